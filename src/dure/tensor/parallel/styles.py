"""Styles: how a module is made tensor parallel on an axis of a mesh.

A style distributes the module's parameters, and registers hooks that redistribute its inputs and
outputs to the required placements:

    ColwiseParallel    Linear: output features on the ranks    R        -> S(-1)
                       Embedding: columns of the table         R        -> S(-1)
    RowwiseParallel    Linear: input features on the ranks     S(-1)    -> P -> R
                       Embedding: rows of the table            R        -> P -> R
    SequenceParallel   norms, dropout: parameters replicated   S(seq)   -> S(seq)

A column-wise layer followed by a row-wise one costs one all_reduce forward and one backward. If the
activations between such pairs are sharded over the sequence, an all_gather and a reduce_scatter
replace each all_reduce, and activations take 1/n of the memory (https://arxiv.org/abs/1909.08053,
https://arxiv.org/abs/2205.05198).

A plain input is taken as this rank's part under `input_layouts`; the output is a plain tensor if
`use_local_output` is set.

Layers that get the same input one after another, such as q, k and v of attention, share the
redistributed input (`_InputCache`): it is redistributed once, and so is its gradient.
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
from dure.tensor.parallel.adapters import LayerHooks, layer_within, placement_like
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
    """A way to parallelize a module; the base class of styles, also for custom ones.

    Attributes:
        src_data_rank: The rank whose parameters are distributed; None: each rank uses its own. Set
            by `parallelize_module`.

    Obtained from:
        Its subclasses, such as `ColwiseParallel`; programs may write others.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Parallelize a module in place and return it."""

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
    """Return a tensor as a DTensor with the required placement.

    Args:
        tensor: A DTensor, or this rank's part of one.
        mesh: A mesh of one axis.
        given: The placement of a plain tensor.
        wanted: The required placement; if None, the tensor is not redistributed.
        features: Size of the full tensor's last dimension, which ranks may not divide.
    """
    if not isinstance(tensor, DTensor):
        tensor = from_part(tensor, _spec_of_part(tensor, mesh, given, features))
    if wanted is None:
        return tensor
    target = _target(tensor.spec, wanted)
    return tensor if target is tensor.spec else to_target(tensor, target)


class _InputCache:
    """The redistributed input of the last layer, for the next layer that gets the same input.

    It is used only if redistributing again would give the same: the versions of both tensors, the
    arguments, and whether gradients are enabled must be unchanged.
    """

    def __init__(self) -> None:
        self.source: torch.Tensor | None = None
        self.result: DTensor | None = None
        self.made: tuple[object, ...] = ()

    def moved(self, tensor: torch.Tensor, *args: Any) -> DTensor:
        """Return the result of `moved`, from the cache if the arguments are the same."""
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
    """Return the versions of a tensor and its part; None for inference tensors, which have none."""
    part = tensor.part if isinstance(tensor, DTensor) else tensor
    return None if part.is_inference() else (tensor._version, part._version)


class _RunningModules(threading.local):
    """One cache for each running module that was passed to `parallelize_module`."""

    def __init__(self) -> None:
        self.caches: list[_InputCache] = []


_running = _RunningModules()


def _begin(*_: object) -> None:
    _running.caches.append(_InputCache())


def _end(*_: object) -> None:
    if _running.caches:  # else a hook before `_begin` has failed
        _running.caches.pop()


def share_inputs(module: nn.Module) -> None:
    """Let the layers of a module share redistributed inputs while the module runs."""
    module.register_forward_pre_hook(_begin, prepend=True)
    module.register_forward_hook(_end, always_call=True)


_specs: dict[tuple[object, ...], DTensorSpec] = {}
_MOST_SPECS = 1 << 12
when_left.append(_specs.clear)


def _spec_of_part(
    part: torch.Tensor, mesh: DeviceMesh, given: Placement, features: int | None
) -> DTensorSpec:
    """Return the spec of a tensor from this rank's part.

    Raises:
        ShapeError: The full tensor does not have this number of features.
    """
    # The mesh is identified by its number: meshes of ranks that are threads may be equal.
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
    """Replace a parameter of a module by a DTensor; a shared parameter stays shared.

    Raises:
        PlacementError: Another module shares it and requires another placement.
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
            "two modules that share a parameter require different placements for it",
            seen=f"{name} of {type(module).__name__} must be {placement!r}, the other module "
            f"requires {known[0]!r}",
            fix="Choose matching styles: RowwiseParallel for an embedding and ColwiseParallel for "
            "an output layer tied to it both shard the vocabulary.",
        )
    else:
        tied = known[1]
    module.register_parameter(name, tied)


class _LayerParallel(ParallelStyle):
    """The common base of ColwiseParallel and RowwiseParallel."""

    _parameters: ClassVar[Mapping[type[nn.Module], Mapping[str, Placement]]]
    """For each class of module the placements of its parameters."""
    _input: ClassVar[Mapping[type[nn.Module], Placement]]
    """For each class of module the required placement of its input."""
    _output: ClassVar[Placement]
    """The default placement of the output."""

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
        found = layer_within(module, tuple(self._parameters))
        if found is None:
            raise UsageError(
                f"{type(self).__name__} does not fit this module",
                seen=f"{type(module).__name__}",
                fix="It supports nn.Linear and nn.Embedding, also within adapters. Use "
                "SequenceParallel for norms and dropout; PrepareModuleInput and "
                "PrepareModuleOutput fit every module.",
            )
        layer, adapters = found
        kind = next(kind for kind in self._parameters if isinstance(layer, kind))
        cut = self._parameters[kind]
        weight = layer.get_parameter("weight")
        src = self.src_data_rank
        for owner, name in adapters:
            placement = placement_like(owner.get_parameter(name), weight, cut["weight"])
            distribute(owner, name, device_mesh, placement, src)
        for name, placement in cut.items():
            if getattr(layer, name, None) is not None:
                distribute(layer, name, device_mesh, placement, src)
        wanted = self._input[kind]
        given, out = self.input_layouts or wanted, self.output_layouts or self._output
        features = layer.in_features if isinstance(layer, nn.Linear) else None

        def before(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            move = _running.caches[-1].moved if _running.caches else moved
            try:
                x = move(inputs[0], device_mesh, given, wanted, features)
            except ShapeError:
                x = inputs[0]
            if features not in (None, x.shape[-1]) or not isinstance(x, DTensor):
                raise ShapeError(
                    f"{type(self).__name__}: the input has a wrong number of features",
                    seen=f"{layer} got an input of {list(inputs[0].shape)} on this rank, as its "
                    f"part under {given!r}",
                    fix="If each rank has the full input, pass input_layouts=Replicate().",
                )
            return x, *inputs[1:]

        def after(output: torch.Tensor) -> torch.Tensor:
            result = moved(output, device_mesh, out, out)
            return part_of(result) if self.use_local_output else result

        style = f"{type(self).__name__}: {given} to {out}, use_local_output={self.use_local_output}"
        LayerHooks(style, before, after).register(layer, module)
        return module


class ColwiseParallel(_LayerParallel):
    """Shard the output features of a Linear, or the columns of an Embedding.

    Args:
        input_layouts: The placement of a plain input; Replicate if None.
        output_layouts: The placement to which the output is redistributed; Shard(-1) if None.
        use_local_output: Whether to return this rank's part, a plain tensor, instead of a DTensor.

    Raises:
        UsageError: By `parallelize_module`: the module is not a Linear or Embedding and does not
            wrap one, or is already parallel with another style.
        ShapeError: At the call: the input has a wrong number of features.

    Cost:
        Forward nothing if the input is replicated; backward one all_reduce of the input's gradient.

    Example:
        ```python
        from dure.tensor import init_device_mesh
        from dure.tensor.parallel import ColwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layer = parallelize_module(torch.nn.Linear(3, 8), mesh, ColwiseParallel())
        assert layer(torch.ones(5, 3)).shape == (5, 4)  # this rank's 4 of 8 features
        ```
    """

    _parameters: ClassVar = {
        nn.Linear: {"weight": Shard(0), "bias": Shard(0)},
        nn.Embedding: {"weight": Shard(1)},
    }
    _input: ClassVar = {nn.Linear: Replicate(), nn.Embedding: Replicate()}
    _output: ClassVar = Shard(-1)


class RowwiseParallel(_LayerParallel):
    """Shard the input features of a Linear, or the rows of an Embedding.

    Args:
        input_layouts: The placement of a plain input; if None, Shard(-1) for a Linear and Replicate
            for an Embedding.
        output_layouts: The placement to which the output, which is Partial, is redistributed;
            Replicate if None.
        use_local_output: Whether to return this rank's part, a plain tensor, instead of a DTensor.

    Raises:
        UsageError: By `parallelize_module`: the module is not a Linear or Embedding and does not
            wrap one, or is already parallel with another style.
        ShapeError: At the call: the input has a wrong number of features.

    Cost:
        Forward one all_reduce of the output, or a reduce_scatter if `output_layouts` is Shard;
        backward nothing, or an all_gather.

    Example:
        ```python
        from dure.tensor import init_device_mesh
        from dure.tensor.parallel import RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        table = parallelize_module(torch.nn.Embedding(10, 3), mesh, RowwiseParallel())
        assert table.weight.to_local().shape == (5, 3)  # this rank's 5 of 10 rows
        assert table(torch.tensor([1, 7])).shape == (2, 3)
        ```
    """

    _parameters: ClassVar = {
        nn.Linear: {"weight": Shard(1), "bias": Replicate()},
        nn.Embedding: {"weight": Shard(0)},
    }
    _input: ClassVar = {nn.Linear: Shard(-1), nn.Embedding: Replicate()}
    _output: ClassVar = Replicate()


class SequenceParallel(ParallelStyle):
    """Activations sharded over the sequence, parameters replicated: LayerNorm, RMSNorm, Dropout.

    Args:
        sequence_dim: The dimension of the sequence in the input.
        use_local_output: Whether to return this rank's part, a plain tensor, instead of a DTensor.

    Raises:
        UsageError: At the call: the input is not a tensor.

    Cost:
        Nothing in forward and backward. The parameters' gradients are Partial; one all_reduce
        reduces each when ``.grad`` is first read.

    Example:
        ```python
        from dure.tensor import Shard, init_device_mesh
        from dure.tensor.parallel import SequenceParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        norm = parallelize_module(torch.nn.LayerNorm(4), mesh, SequenceParallel())
        output = norm(torch.ones(1, 3, 4))  # 3 of 6 positions
        assert output.shape == (1, 6, 4) and output.placements == (Shard(1),)
        ```
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
                    f"the input of {type(module).__name__} is not a tensor", seen=f"{inputs[0]!r}"
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
    """Return a value with the required placement, as this rank's part if `local`."""
    if given is None:
        return value
    if not isinstance(value, torch.Tensor):
        raise PlacementError(
            f"{type(module).__name__} has a layout for an argument or result that is not a tensor",
            seen=f"{value!r}",
            fix="Pass None as its layout.",
        )
    result = moved(value, mesh, given, wanted)
    return part_of(result) if local else result


def _check_pair(given: Sequence[object] | None, wanted: Sequence[object] | None, what: str) -> None:
    if given is not None and (wanted is None or len(given) != len(wanted)):
        raise PlacementError(
            f"{what}_layouts and desired_{what}_layouts must have one entry for each tensor",
            seen=f"{given} and {wanted}",
        )


class PrepareModuleInput(ParallelStyle):
    """Redistribute the inputs of a module to the placements that it requires.

    Args:
        input_layouts: For each positional input the placement of a plain tensor; None for inputs
            that are passed on unchanged.
        desired_input_layouts: For each positional input the required placement.
        input_kwarg_layouts, desired_input_kwarg_layouts: The same for keyword arguments, by name.
        use_local_output: Whether the module gets this rank's parts, plain tensors.

    Raises:
        PlacementError: The numbers of layouts differ; at the call: the number of inputs differs
            from that of the layouts, or an input with a layout is not a tensor.

    Cost:
        At each call the redistribution of each input (see `DTensor.redistribute`), and in backward
        that of its gradient.

    Example:
        ```python
        from dure.tensor import Replicate, Shard, init_device_mesh
        from dure.tensor.parallel import PrepareModuleInput, parallelize_module

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        module = parallelize_module(torch.nn.ReLU(), mesh, style)
        assert module(torch.ones(2, 3)).to_local().shape == (4, 3)  # both ranks' rows
        ```
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
                        fix="Pass None as the layout of inputs that are not tensors.",
                    )
                inputs = tuple(map(prepared, inputs, given, wanted))
            by_name, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
            named = {k: prepared(v, by_name.get(k), desired.get(k)) for k, v in named.items()}
            return inputs, named

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Redistribute the outputs of a module.

    Args:
        output_layouts: For each output the placement of a plain tensor; None for outputs that are
            returned unchanged.
        desired_output_layouts: For each output the required placement.
        use_local_output: Whether the outputs are this rank's parts, plain tensors.

    Raises:
        PlacementError: The numbers of layouts differ; at the call: the number of outputs differs
            from that of the layouts, or an output with a layout is not a tensor.

    Cost:
        At each call the redistribution of each output (see `DTensor.redistribute`), and in backward
        that of its gradient.

    Example:
        ```python
        from dure.tensor import Replicate, Shard, init_device_mesh
        from dure.tensor.parallel import PrepareModuleOutput, parallelize_module

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
        module = parallelize_module(torch.nn.ReLU(), mesh, style)
        assert module(torch.ones(2, 3)).shape == (4, 3)  # both ranks' rows
        ```
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
    """`PrepareModuleInput` and `PrepareModuleOutput` in one style, with the arguments of both.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts: As
            for `PrepareModuleInput`.
        use_local_input: Whether the module gets this rank's parts, plain tensors.
        output_layouts, desired_output_layouts, use_local_output: As for `PrepareModuleOutput`.

    Raises:
        PlacementError: As there.

    Example:
        ```python
        from dure.tensor.parallel import PrepareModuleInputOutput

        style = PrepareModuleInputOutput(
            input_layouts=Shard(0),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(0),
        )
        module = parallelize_module(torch.nn.ReLU(), mesh, style)
        assert module(torch.ones(2, 3)).shape == (2, 3)  # computed with 4 rows
        ```
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
