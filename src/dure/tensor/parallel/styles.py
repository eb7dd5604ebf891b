"""Styles: how a module is made tensor parallel on an axis of a mesh.

A style distributes the module's parameters, and puts hooks before and after its forward that bring
what comes in and goes out to the placements that the computation wants:

    ColwiseParallel    Linear: output features on the ranks    R        -> S(-1)
                       Embedding: columns of the table         R        -> S(-1)
    RowwiseParallel    Linear: input features on the ranks     S(-1)    -> terms -> R
                       Embedding: rows of the table            R        -> terms -> R
    SequenceParallel   norms, dropout: whole parameters        S(seq)   -> S(seq)

A column-wise layer followed by a row-wise one costs one all_reduce forward and one backward; with
the activations between such pairs sharded over the sequence, an all_gather and a reduce_scatter in
its place, and 1/n of the memory (https://arxiv.org/abs/1909.08053, https://arxiv.org/abs/2205.05198).

Tensors that come in as plain ones are taken as this rank's part under `input_layouts`; what goes
out is a plain tensor again where `use_local_output` says so.

Layers that are given the same tensor one after another, as q, k and v of an attention, share what
the first one made of it (`_Shared`): it is moved once, and so is its gradient.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import nn

from dure.comm.world import when_left
from dure.errors import PlacementError, ShapeError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor.autograd import from_part, part_of, to_target
from dure.tensor.distribute import distribute_tensor, share_hooks
from dure.tensor.dtensor import DTensor
from dure.tensor.parallel.adapters import Around, layer_within, placement_like
from dure.tensor.placement_types import Placement, Replicate, Shard
from dure.tensor.spec import DTensorSpec, as_placements

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]

Layouts = Placement | Sequence[Placement | None] | None


class ParallelStyle(ABC):
    """How a module is made parallel; base for one's own styles.

    Attributes:
        src_data_rank: Which rank's parameters are distributed; None: each rank's own. Set by
            `parallelize_module`.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Make a module parallel, in place; return it."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


def moved(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    given: Placement,
    wanted: Placement | None,
    features: int | None = None,
) -> DTensor:
    """Return a tensor as a DTensor with the placement wanted.

    Args:
        tensor: A DTensor, or this rank's part of one.
        mesh: Of one axis.
        given: What `tensor` is a part under, if it is a plain one.
        wanted: What it is brought to; as it is where None.
        features: Size of the whole tensor's last dimension, which ranks may not divide.
    """
    if not isinstance(tensor, DTensor):
        tensor = from_part(tensor, _spec_of_part(tensor, mesh, given, features))
    if wanted is None:
        return tensor
    target = _target(tensor.spec, wanted)
    return tensor if target is tensor.spec else to_target(tensor, target)


class _Shared:
    """What the last layer made of its input, for the next layer that is given the same.

    It must still be what would be made now: the versions of both are compared, and whether it has a
    gradient.
    """

    def __init__(self) -> None:
        self.source: torch.Tensor | None = None
        self.result: DTensor | None = None
        self.made: tuple[object, ...] = ()

    def moved(self, tensor: torch.Tensor, *args: Any) -> DTensor:
        """Return what `moved` does, the same object for the same arguments."""
        versions, result = _versions(tensor), self.result
        made = (versions, torch.is_grad_enabled(), *args)
        if (
            result is None
            or versions is None
            or self.source is not tensor
            or self.made != (*made, _versions(result))
        ):
            result = moved(tensor, *args)
            self.source, self.result, self.made = tensor, result, (*made, _versions(result))
        return result


def _versions(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return how often a tensor and its part were written; None in inference: it is not counted."""
    part = tensor.part if isinstance(tensor, DTensor) else tensor
    return None if part.is_inference() else (tensor._version, part._version)


class _Running(threading.local):
    """For each module that `parallelize_module` was given and that runs, what its layers share."""

    def __init__(self) -> None:
        self.shared: list[_Shared] = []


_running = _Running()


def _begin(*_: object) -> None:
    _running.shared.append(_Shared())


def _end(*_: object) -> None:
    if _running.shared:  # else a hook before `_begin` has failed
        _running.shared.pop()


def share_inputs(module: nn.Module) -> None:
    """Let the layers of a module share what they make of one input while the module runs."""
    module.register_forward_pre_hook(_begin, prepend=True)
    module.register_forward_hook(_end, always_call=True)


_specs: dict[tuple[object, ...], DTensorSpec] = {}
_MOST_SPECS = 1 << 12
when_left.append(_specs.clear)


def _spec_of_part(
    part: torch.Tensor, mesh: DeviceMesh, given: Placement, features: int | None
) -> DTensorSpec:
    """Return the spec of a tensor of which this rank has a part.

    Raises:
        ShapeError: The whole has not this number of features.
    """
    # The mesh by its number: equal meshes of ranks that are threads are not the same.
    key = (part.shape, part.stride(), part.dtype, mesh.number, given, features)
    spec = _specs.get(key)
    if spec is None:
        if len(_specs) >= _MOST_SPECS:
            _specs.clear()
        shape = stride = None
        if features is not None and given in (Shard(-1), Shard(part.ndim - 1)):
            shape = torch.Size([*part.shape[:-1], features])
            stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(part.detach(), mesh, [given], shape=shape, stride=stride)
        spec = _specs[key] = made.spec
    return spec


@lru_cache(maxsize=1 << 12)
def _target(spec: DTensorSpec, wanted: Placement) -> DTensorSpec:
    return spec.with_placements(as_placements([wanted], spec.mesh, spec.ndim, "redistribute"))


when_left.append(_target.cache_clear)


def distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, src: int | None
) -> None:
    """Make a parameter of a module a DTensor; one that several modules share stays shared.

    Raises:
        PlacementError: Another module shares it, and wants another placement.
    """
    parameter = module.get_parameter(name)
    if isinstance(parameter, DTensor):
        return
    known: tuple[Placement, nn.Parameter] | None = getattr(parameter, "_dure_tied", None)
    if known is None:
        made = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=src)
        tied = nn.Parameter(made, parameter.requires_grad)
        share_hooks(parameter, tied)
        parameter._dure_tied = (placement, tied)  # pyright: ignore[reportAttributeAccessIssue]
    elif known[0] != placement:
        raise PlacementError(
            "a parameter that two modules share has one placement",
            seen=f"{name} of {type(module).__name__} is to be {placement!r}, and is {known[0]!r} "
            "for the module that it is shared with",
            fix="Choose styles that agree: RowwiseParallel for an embedding and ColwiseParallel "
            "for an output layer tied to it both shard the vocabulary.",
        )
    else:
        tied = known[1]
    module.register_parameter(name, tied)


class _LayerParallel(ParallelStyle):
    """What the two ways of cutting a Linear or an Embedding share."""

    _cuts: ClassVar[Mapping[type[nn.Module], Mapping[str, Placement]]]
    """For each kind of module the placement of its parameters."""
    _wants: ClassVar[Mapping[type[nn.Module], Placement]]
    """For each kind of module what its input must be."""
    _gives: ClassVar[Placement]
    """What its output is brought to, if nothing else is said."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = input_layouts
        self.output_layouts = output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        found = layer_within(module, tuple(self._cuts))
        if found is None:
            raise UsageError(
                f"{type(self).__name__} does not fit this module",
                seen=f"{type(module).__name__}",
                fix="It cuts nn.Linear and nn.Embedding, also where adapters wrap them. "
                "SequenceParallel fits norms and dropout; PrepareModuleInput and "
                "PrepareModuleOutput fit every module.",
            )
        layer, adapters = found
        kind = next(kind for kind in self._cuts if isinstance(layer, kind))
        cut = self._cuts[kind]
        weight = layer.get_parameter("weight")
        src = self.src_data_rank
        for owner, name in adapters:
            placement = placement_like(owner.get_parameter(name), weight, cut["weight"])
            distribute(owner, name, device_mesh, placement, src)
        for name, placement in cut.items():
            if getattr(layer, name, None) is not None:
                distribute(layer, name, device_mesh, placement, src)
        wanted = self._wants[kind]
        given, out = self.input_layouts or wanted, self.output_layouts or self._gives
        features = layer.in_features if isinstance(layer, nn.Linear) else None

        def before(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            move = _running.shared[-1].moved if _running.shared else moved
            try:
                x = move(inputs[0], device_mesh, given, wanted, features)
            except ShapeError:
                x = inputs[0]
            if features not in (None, x.shape[-1]) or not isinstance(x, DTensor):
                raise ShapeError(
                    f"{type(self).__name__}: the layer takes another number of features",
                    seen=f"{layer} is given an input of {list(inputs[0].shape)} on this rank, as "
                    f"its part under {given!r}",
                    fix="Where each rank has the whole input, say input_layouts=Replicate().",
                )
            return x, *inputs[1:]

        def after(output: torch.Tensor) -> torch.Tensor:
            result = moved(output, device_mesh, out, out)
            return part_of(result) if self.use_local_output else result

        told = f"{type(self).__name__}: {given} to {out}, use_local_output={self.use_local_output}"
        Around(told, before, after).register(layer, module)
        return module


class ColwiseParallel(_LayerParallel):
    """Output features of a Linear, or columns of an Embedding, on the ranks.

    Args:
        input_layouts: What a plain input is a part under; replicated where None.
        output_layouts: What the output is brought to; sharded on the last dimension where None.
        use_local_output: Whether the output is this rank's part, a plain tensor.

    Cost:
        Forward none if the input is whole; backward an all_reduce of the input's gradient.
    """

    _cuts: ClassVar = {
        nn.Linear: {"weight": Shard(0), "bias": Shard(0)},
        nn.Embedding: {"weight": Shard(1)},
    }
    _wants: ClassVar = {nn.Linear: Replicate(), nn.Embedding: Replicate()}
    _gives: ClassVar = Shard(-1)


class RowwiseParallel(_LayerParallel):
    """Input features of a Linear, or rows of an Embedding, on the ranks.

    Args:
        input_layouts: What a plain input is a part under; where None, sharded on the last dimension
            for a Linear, replicated for an Embedding.
        output_layouts: What the output, terms of a sum, is brought to; replicated where None.
        use_local_output: Whether the output is this rank's part, a plain tensor.

    Raises:
        ShapeError: At the call: the input has not the layer's number of features.

    Cost:
        Forward an all_reduce of the output, or a reduce_scatter if it is brought to `Shard`;
        backward none, or an all_gather.
    """

    _cuts: ClassVar = {
        nn.Linear: {"weight": Shard(1), "bias": Replicate()},
        nn.Embedding: {"weight": Shard(0)},
    }
    _wants: ClassVar = {nn.Linear: Shard(-1), nn.Embedding: Replicate()}
    _gives: ClassVar = Replicate()


class SequenceParallel(ParallelStyle):
    """Activations sharded over the sequence, parameters whole: LayerNorm, RMSNorm, Dropout.

    Args:
        sequence_dim: The dimension of the sequence.
        use_local_output: Whether the output is this rank's part, a plain tensor.

    Cost:
        None; the parameters' gradients are terms, reduced when ``.grad`` is first read.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters(recurse=False)):
            distribute(module, name, device_mesh, Replicate(), self.src_data_rank)
        sharded = Shard(self.sequence_dim)

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            if not isinstance(inputs[0], torch.Tensor):
                raise UsageError(
                    f"the input of {type(module).__name__} is no tensor", seen=f"{inputs[0]!r}"
                )
            return moved(inputs[0], device_mesh, sharded, sharded), *inputs[1:]

        def after(_: nn.Module, inputs: object, output: DTensor) -> torch.Tensor:
            return part_of(output) if self.use_local_output else output

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


def _as_layouts(layouts: Layouts) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


def _prepared(
    module: nn.Module,
    mesh: DeviceMesh,
    local: bool,
    value: Any,
    given: Placement | None,
    wanted: Placement | None,
) -> Any:
    """Return what has a layout with the placement wanted, as a part if that is asked for."""
    if given is None:
        return value
    if not isinstance(value, torch.Tensor):
        raise PlacementError(
            f"{type(module).__name__} has a layout for what is no tensor",
            seen=f"{value!r}",
            fix="Give None as its layout.",
        )
    result = moved(value, mesh, given, wanted)
    return part_of(result) if local else result


def _check_pair(given: Sequence[object] | None, wanted: Sequence[object] | None, what: str) -> None:
    if given is not None and (wanted is None or len(given) != len(wanted)):
        raise PlacementError(
            f"{what}_layouts and desired_{what}_layouts have one entry for each tensor",
            seen=f"{given} and {wanted}",
        )


class PrepareModuleInput(ParallelStyle):
    """Bring the tensors that a module is given to the placements that it wants.

    Args:
        input_layouts: For each positional input what a plain tensor is a part under; None for what
            is to be left as it is.
        desired_input_layouts: What each is brought to.
        input_kwarg_layouts, desired_input_kwarg_layouts: The same, by keyword.
        use_local_output: Whether the module gets this rank's parts, plain tensors.

    Raises:
        PlacementError: The numbers of layouts differ; at the call, that of the inputs.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _as_layouts(input_layouts)
        self.desired_input_layouts = _as_layouts(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        _check_pair(self.input_layouts, self.desired_input_layouts, "input")
        _check_pair(
            sorted(self.input_kwarg_layouts),
            sorted(self.desired_input_kwarg_layouts),
            "input_kwarg",
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        prepared = partial(_prepared, module, device_mesh, self.use_local_output)

        def before(
            _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given, wanted = self.input_layouts, self.desired_input_layouts
            if given is not None and wanted is not None:
                if len(inputs) != len(given):
                    raise PlacementError(
                        f"{type(module).__name__} has another number of inputs than layouts",
                        seen=f"{len(inputs)} inputs, {len(given)} input_layouts",
                        fix="Give None for those that are no tensors.",
                    )
                inputs = tuple(map(prepared, inputs, given, wanted))
            by_name, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
            named = {k: prepared(v, by_name.get(k), desired.get(k)) for k, v in named.items()}
            return inputs, named

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Bring the tensors that a module returns to the placements that its user wants.

    Args:
        output_layouts: For each output what a plain tensor is a part under; None for what is to be
            left as it is.
        desired_output_layouts: What each is brought to.
        use_local_output: Whether the outputs are this rank's parts, plain tensors.

    Raises:
        PlacementError: The numbers of layouts differ; at the call, that of the outputs.
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _as_layouts(output_layouts)
        self.desired_output_layouts = _as_layouts(desired_output_layouts)
        self.use_local_output = use_local_output
        _check_pair(self.output_layouts, self.desired_output_layouts, "output")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        given = self.output_layouts or ()
        wanted = self.desired_output_layouts or ()
        prepared = partial(_prepared, module, device_mesh, self.use_local_output)

        def after(_: nn.Module, inputs: object, outputs: Any) -> Any:
            found: tuple[Any, ...] = outputs if isinstance(outputs, tuple) else (outputs,)
            if len(found) != len(given):
                raise PlacementError(
                    f"{type(module).__name__} has another number of outputs than layouts",
                    seen=f"{len(found)} outputs, {len(given)} output_layouts",
                )
            results = [*map(prepared, found, given, wanted)]
            return tuple(results) if len(results) > 1 else results[0]

        module.register_forward_hook(after)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one, with the arguments of both.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: As
            there.
        use_local_input: Whether the module gets this rank's parts, plain tensors.
        output_layouts, desired_output_layouts, use_local_output: As there.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_input._apply(module, device_mesh)  # pyright: ignore[reportPrivateUsage]
        return self.prepare_output._apply(module, device_mesh)  # pyright: ignore
