"""One parameter of a sharded module: its shard, and the unsharded parameter of computations.

    module.weight   between steps: the shard, an nn.Parameter that is a DTensor. Optimizers have it.
                    in forward and backward: the unsharded parameter, another nn.Parameter, plain or
                    a DTensor of the tensor-parallel mesh.

Autograd fills the unsharded ``.grad``, and calls a hook: so it is known which parameters took
part in a backward, however the backward reached them. The group reduces the gradient, and what is
this rank's becomes the shard's ``.grad``. The program's hooks on the shard (`register_hook`,
`register_post_accumulate_grad_hook`, `register_multi_grad_hook`) run then: see `run_hooks`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dure import torch_private
from dure.errors import ModuleError
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.host_memory import HostMemory
from dure.parallel.fsdp.policies import MixedPrecisionPolicy
from dure.tensor.distribute import share_hooks
from dure.tensor.dtensor import DTensor
from dure.tensor.placement_types import chunk
from dure.tensor.spec import DTensorSpec, TensorMeta, spec_of
from dure.tensor.wrapping import wrap
from dure.training.grad_views import own_part, part_in, unreduced_gradient
from dure.training.mapped_files import Files
from dure.training.optimizers import forget_replaced, note_replaced, note_unsharded

__all__ = ["FSDPParameter", "run_hooks"]

_WITHOUT_VALUES = {
    "__get__", "__set__", "__delete__", "__dir__", "__format__", "__len__", "data_ptr", "dim",
    "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point",
    "is_inference", "is_pinned", "is_shared", "nelement", "ndimension", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride",
    "untyped_storage",
}  # fmt: skip
"""Functions that read no values."""

_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Properties that are plain tensors over the same memory."""


class _Freed:
    """The class of an unsharded parameter that has no memory: it cannot be read.

    Torch's kernels do not check that there is memory: they would end the process.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name == "__get__" and getattr(func.__self__, "__name__", "") in _VIEWS:
            raise _read(func.__self__.__name__)
        names_type = name == "type" and len(args) == 1 and not kwargs  # else it converts
        if name in _WITHOUT_VALUES or names_type:
            with torch_private.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _read(name)

    def __deepcopy__(self, memo: object) -> Any:
        """Raise: `nn.Parameter` would copy its memory, and does not ask `__torch_function__`."""
        raise _read("deepcopy")

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raise, for the same reason: pickled, or copied."""
        raise _read("__reduce_ex__")

    def __repr__(self, **_: object) -> str:
        values: Any = self
        return f"<unsharded parameter {list(values.shape)}, freed when its module was resharded>"


def _read(op: str) -> ModuleError:
    return ModuleError(
        "an unsharded parameter was used after its module was resharded",
        op=op,
        fix="Read the parameter of the module, which is the shard now; or call unshard() of "
        "the module first, or use fsdp.full_parameters(model).",
    )


class _FreedParameter(_Freed, nn.Parameter):
    pass


class _FreedTensor(_Freed, torch.Tensor):
    pass


_FREED: dict[type, type] = {nn.Parameter: _FreedParameter, torch.Tensor: _FreedTensor}
_READABLE = {freed: readable for readable, freed in _FREED.items()}


def _change_class(tensor: torch.Tensor, classes: dict[type, type]) -> None:
    """Exchange a tensor's class by the one in `classes`; subclasses of programs are kept."""
    if type(tensor) in classes:
        tensor.__class__ = classes[type(tensor)]


class FSDPParameter:
    """A parameter that a `fully_shard` call manages.

    Args:
        parameter: The module's parameter; plain, or a DTensor over other axes of the mesh.

    Attributes:
        name: Its path in the root module, for messages.
        places: Every (module, attribute) that has it.
        dim: The dimension that is cut.
        axes: Over which.
        policy: The dtype in which modules compute.
        files: Keeps the shard, its gradient and its optimizer state in files; or None.
        host: Keeps them in the host's memory, while modules compute on a device; or None.
        unsharded_shape: Of the unsharded parameter, or of this rank's tensor-parallel part of it.
        sharded: The nn.Parameter of this rank's shard, a DTensor.
        unsharded: The nn.Parameter that modules compute with; None before its first use.
        dtype: Of the unsharded parameter.
        on_gradient: Called when a backward has filled the unsharded ``.grad``.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        places: list[tuple[nn.Module, str]],
        dim: int,
        axes: DataAxes,
        policy: MixedPrecisionPolicy,
        files: Files | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self.name = places[0][1]
        self.places, self.dim, self.axes, self.policy = places, dim, axes, policy
        self.files, self.host = files, host
        self._inner = parameter.spec if isinstance(parameter, DTensor) else None
        local = own_part(parameter).detach()
        self.unsharded_shape = local.shape
        size, offset = chunk(local.shape[dim], axes.size, axes.rank)
        # A copy, so that the memory of the original can be freed.
        part = local.narrow(dim, offset, size).clone(memory_format=torch.contiguous_format)
        if host is not None:
            part = host.shard_in(part)
        sharded = nn.Parameter(wrap(part, axes.shard_spec(parameter, dim)), parameter.requires_grad)
        forget_replaced(parameter)  # a tied one may be taken a second time
        for key, value in vars(parameter).items():
            setattr(sharded, key, value)
        share_hooks(parameter, sharded)
        self.on_gradient: Callable[[FSDPParameter], None] | None = None
        self._set_sharded(sharded)
        self.accumulated: torch.Tensor | None = None

    def _set_sharded(self, sharded: Any) -> None:
        self.sharded: nn.Parameter = sharded
        self.spec: DTensorSpec = sharded.spec
        low = self.policy.param_dtype if sharded.is_floating_point() else None
        self.dtype: torch.dtype = low or sharded.dtype
        self.unsharded: nn.Parameter | None = None
        self._gradient_buffer: torch.Tensor | None = None
        self._mark_files()

    def _mark_files(self) -> None:
        """Let optimizers keep the state of the shard in files; mark one that is on the host."""
        if self.files is not None:
            self.sharded._dure_files = self.files  # pyright: ignore
        if self.host is not None:
            self.sharded._dure_on_host = True  # pyright: ignore

    def now(self) -> tuple[nn.Parameter, str]:
        """Return the shard that there is now, and its name; see `note_replaced`."""
        return self.sharded, self.name

    @property
    def part(self) -> torch.Tensor:
        """The values of this rank's shard."""
        return own_part(self.sharded)

    @property
    def device(self) -> torch.device:
        """Where modules compute with the parameter."""
        return self.part.device if self.host is None else self.host.device

    @property
    def is_trained(self) -> bool:
        """Whether it needs a gradient; it may be frozen after `fully_shard`, on all ranks."""
        return self.sharded.requires_grad

    @property
    def version(self) -> int:
        """A number that changes when this rank's shard is written in place."""
        return self.sharded._version + self.part._version

    @property
    def unsharded_version(self) -> int:
        """A number that changes when the unsharded parameter is written in place."""
        return (
            0
            if self.unsharded is None
            else self.unsharded._version + own_part(self.unsharded)._version
        )

    def has_changed(self) -> None:
        """Let autograd refuse what it has saved of the unsharded parameter."""
        if self.unsharded is not None:
            torch.autograd.graph.increment_version(self.unsharded)

    @property
    def is_replaced(self) -> bool:
        """Whether the module has another parameter than the sharded or the unsharded one."""
        module, name = self.places[0]
        found = module._parameters.get(name)  # pyright: ignore[reportPrivateUsage]
        return found is not self.sharded and found is not self.unsharded

    def adopt(self) -> bool:
        """Take over the parameter that the module has now; return whether it was replaced.

        ``to_empty``, ``to(dtype)``, ``load_state_dict(assign=True)`` do so, or change what it is.
        """
        module, name = self.places[0]
        found: Any = module._parameters.get(name)  # pyright: ignore[reportPrivateUsage]
        if found is self.unsharded:
            found = self.sharded
        if self.host is not None and self._is_shard(found):
            found = self._on_host(found)
        if found is self.sharded and found.spec is self.spec:
            self._mark_files()  # `to_empty` exchanges all that the object has
            return False
        if not self._is_shard(found):
            raise ModuleError(
                "a sharded parameter was replaced by what is no shard of it",
                op="FSDP forward",
                parameters=(self.name,),
                seen=str(getattr(found, "spec", getattr(found, "shape", None))),
                fix="Assign a DTensor of the same mesh and placements, or copy_ the values.",
            )
        note_replaced(self.sharded, self.now)
        self._set_sharded(found)
        return True

    def _on_host(self, found: Any) -> Any:
        """Return a shard that the program has assigned; if it is on a device, another on the host.

        Optimizers that have the program's get the other one.
        """
        assert self.host is not None
        if found.device.type in ("cpu", "meta"):
            return found
        part = self.host.shard_in(found.part)
        moved = nn.Parameter(wrap(part, found.spec), found.requires_grad)
        if found.grad is not None:
            moved.grad = wrap(self.host.shard_in(found.grad.part), found.grad.spec)
        for key, value in vars(found).items():
            setattr(moved, key, value)
        share_hooks(found, moved)
        note_replaced(found, self.now)
        self._set_on_modules(moved)
        return moved

    def _is_shard(self, found: object) -> bool:
        """Whether a parameter that the program has assigned can take the place of the shard."""
        return isinstance(found, DTensor) and found.spec.placements == self.spec.placements

    @property
    def assigned(self) -> nn.Parameter | None:
        """The shard that the program has assigned in one of the places, if any."""
        for module, name in self.places:
            found: Any = module._parameters.get(name)  # pyright: ignore[reportPrivateUsage]
            is_new = found is not self.sharded and found is not self.unsharded
            if is_new and self._is_shard(found):
                return found
        return None

    # ---------------------------------------------------------------- what modules have

    def to_sharded(self, keeps_assigned: bool = True) -> None:
        """Let modules have the shard.

        Args:
            keeps_assigned: Let them have a shard that the program has assigned instead, if any.
        """
        assigned = self.assigned if keeps_assigned else None
        self._set_on_modules(self.sharded if assigned is None else assigned)

    def to_unsharded(self, tensor: torch.Tensor) -> None:
        """Let modules have the unsharded parameter, with values in `tensor` [unsharded_shape]."""
        if self.unsharded is None:
            with torch.inference_mode(False):  # in which it may be needed first
                self.unsharded = nn.Parameter(
                    self._as_unsharded(tensor), self.sharded.requires_grad
                )
            note_unsharded(
                self.unsharded, self.now
            )  # for optimizers that are made while it is shown
            self._is_watched = False
        self.allow_reading()
        self.unsharded.requires_grad_(self.sharded.requires_grad)
        if not self._is_watched and self.unsharded.requires_grad:
            self._watch(self.unsharded)
            self._is_watched = True
        self._set_on_modules(self.unsharded)

    def allow_reading(self) -> None:
        """Let the program read the unsharded parameter, which has its values."""
        if self.unsharded is not None:
            _change_class(own_part(self.unsharded), _READABLE)

    def forbid_reading(self) -> None:
        """Raise if the program reads the unsharded parameter, which has no memory."""
        if self.unsharded is not None:
            _change_class(own_part(self.unsharded), _FREED)

    def _as_unsharded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, or the DTensor whose part it is on this rank."""
        if self._inner is None:
            return tensor
        meta = TensorMeta(self._inner.shape, self._inner.meta.stride, self.dtype)
        # A separate tensor, because `forbid_reading` must not change the strategy's.
        part = tensor.detach()
        return wrap(part, spec_of(self._inner.mesh, self._inner.placements, meta))

    def _watch(self, unsharded: nn.Parameter) -> None:
        """Have `on_gradient` called when a backward has filled the ``.grad`` of `unsharded`."""
        me = weakref.ref(self)

        def gradient_accumulated(filled: torch.Tensor) -> None:
            parameter = me()
            if parameter is None or parameter.on_gradient is None:
                return
            if filled is not parameter.unsharded:
                filled.grad = None
                raise ModuleError(
                    "a sharded parameter was replaced between forward and backward",
                    op="FSDP backward",
                    parameters=(parameter.name,),
                    seen=f"its gradient arrived at what forward used, {list(filled.shape)}",
                    fix="Convert or replace parameters between steps.",
                )
            parameter.on_gradient(parameter)

        unsharded.register_post_accumulate_grad_hook(gradient_accumulated)

    def _set_on_modules(self, parameter: nn.Parameter) -> None:
        for module, name in self.places:
            if "_flat_weights" in module.__dict__:  # recurrent layers keep a list besides
                setattr(module, name, parameter)
            else:
                module._parameters[name] = parameter  # pyright: ignore[reportPrivateUsage]

    # ---------------------------------------------------------------- gradients

    @property
    def gradient_has_history(self) -> bool:
        """Whether the unsharded gradient can be differentiated."""
        gradient = None if self.unsharded is None else unreduced_gradient(self.unsharded)
        return gradient is not None and gradient.requires_grad

    def pop_gradient(self, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Return the unsharded gradient plus what was accumulated before, and forget both."""
        self.accumulate(dtype)
        gradient, self.accumulated = self.accumulated, None
        return gradient

    def accumulate(self, dtype: torch.dtype | None) -> None:
        """Move the unsharded gradient aside, and add up in `dtype`; a later backward reduces it.

        What is pending over other axes, as of a norm's weight under sequence parallelism, is
        reduced here, in `dtype` too.
        """
        gradient = None if self.unsharded is None else unreduced_gradient(self.unsharded)
        if self.unsharded is None or gradient is None:
            return
        if isinstance(gradient, DTensor):
            assert isinstance(self.unsharded, DTensor)
            gradient = part_in(gradient, self.unsharded, dtype)
        self.unsharded.grad = None
        if self.accumulated is not None:
            gradient = gradient.to(dtype or gradient.dtype)
            gradient = self.accumulated.to(gradient.dtype).add_(gradient)
        self.accumulated = gradient

    @property
    def has_hooks(self) -> bool:
        """Whether the program has hooks on the shard that run when it gets its gradient."""
        return self.waits_for_end or bool(self.sharded._post_accumulate_grad_hooks)  # pyright: ignore

    @property
    def waits_for_end(self) -> bool:
        """Whether one of them may wait for gradients of others: `register_multi_grad_hook`."""
        return bool(self.sharded._backward_hooks)  # pyright: ignore

    def as_gradient(self, part: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the reduced gradient as what `run_hooks` adds to ``.grad``."""
        return wrap(part.to(self.sharded.dtype), self.spec)

    def add_gradient(self, part: torch.Tensor) -> None:
        """Add this rank's part of the reduced gradient to the shard's."""
        part = part.to(self.sharded.dtype)
        if self.sharded.grad is None:
            self.sharded.grad = wrap(self._in_file(part), self.spec)
        else:
            grad: Any = self.sharded.grad
            grad.part.add_(part)

    def _in_file(self, part: torch.Tensor) -> torch.Tensor:
        """Return a gradient in its file, if it is to be kept in one."""
        if self.files is None:
            return part
        room = self._gradient_buffer
        if room is None or room.dtype != part.dtype:
            room = self._gradient_buffer = self.files.zeros(part.shape, part.dtype)
        return part if part is room else room.copy_(part)

    def keep_gradient_in_file(self) -> None:
        """Move the gradient that autograd has stored into its file, if it is to be kept there."""
        grad: Any = self.sharded.grad
        if self.files is not None and grad is not None:
            grad.part = self._in_file(grad.part)


def run_hooks(parameters: Sequence[FSDPParameter], gradients: Sequence[torch.Tensor]) -> None:
    """Add gradients to those of the shards as a backward of autograd, which runs all their hooks.

    Args:
        parameters: Which ones.
        gradients: `FSDPParameter.as_gradient` of each.
    """
    torch.autograd.backward([p.sharded for p in parameters], gradients)
    for parameter in parameters:
        parameter.keep_gradient_in_file()
