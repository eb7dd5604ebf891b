"""Computing in fewer bits than parameters are kept in.

Parameters stay in float32: the optimizer, `state_dict` and `module.parameters()` never see anything
else. Before a forward each of them is cast once, differentiably; during forward the copy *shadows*
its parameter:

    module._parameters["weight"]    the parameter, float32
    module.__dict__["weight"]       its copy, e.g. bfloat16: what `self.weight` finds first

A module computes with the copies, and autograd leads their gradients through the casts back to the
parameters, as float32. Nothing else has to know: gradients add up in float32 over several forwards
and under `no_sync`, are moved to flat buffers as always, and are reduced in `reduce_dtype` because
the flat buffers are made in it (grad_views.py).

The shadows are put back during backward, because checkpointed parts run their forward in it. In
between, and after, the module is its float32 self.

Modules that are *ignored* compute in their own dtype, with inputs and outputs cast on their border.
Buffers are exchanged in `_buffers` itself, because modules write to them: a written value is
carried over to the float32 one when the shadow goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from dure.errors import ModuleError
from dure.torch_private import BatchNorm
from dure.training import autograd_hooks
from dure.training.pytrees import cast_floats

__all__ = ["ComputeCopies", "MixedPrecision"]

_ABSENT = object()
# torch's own kernels take low-precision inputs with float32 statistics: no cast on their border.
_MIXED_INSIDE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_floating(policy: object, *names: str) -> None:
    """Raise a ModuleError unless what a policy has under these names are such dtypes, or None."""
    for name in names:
        dtype: torch.dtype | None = getattr(policy, name)
        if dtype is not None and not dtype.is_floating_point:
            raise ModuleError(
                "mixed precision is for floating-point dtypes",
                op=type(policy).__name__,
                seen=f"{name}={dtype}",
                fix="Use torch.bfloat16, or torch.float16 with a GradScaler.",
            )


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """What a module computes, reduces and keeps buffers in; None leaves a thing as it is.

    Parameters, their gradients and the optimizer's state stay in the dtype the module was made in.

    Attributes:
        param_dtype: Of parameters and inputs during forward and backward.
        reduce_dtype: In which gradients are sent and averaged; `param_dtype` by default.
        buffer_dtype: Of buffers during forward.
        cast_forward_inputs: Cast floating-point inputs of the module to `param_dtype`.
        module_classes_to_ignore: Modules of these classes, and all inside them, compute in their
            own dtype. Batch norm by default: its statistics need the bits.
        modules_to_ignore: The same for single modules, by their paths.

    Example:
        ```python
        precision = dist.MixedPrecision(param_dtype=torch.bfloat16)
        model = dist.DistributedDataParallel(torch.nn.Linear(2, 1), mixed_precision=precision)
        assert model(torch.ones(1, 2)).dtype is torch.bfloat16
        ```
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    module_classes_to_ignore: tuple[type[nn.Module], ...] = (BatchNorm,)
    modules_to_ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_floating(self, "param_dtype", "reduce_dtype", "buffer_dtype")

    @classmethod
    def of(cls, given: Any) -> MixedPrecision:
        """Return `given` as a `MixedPrecision`: None, one, or torch's class of the same fields."""
        if given is None or isinstance(given, cls):
            return given or cls()
        if not hasattr(given, "reduce_dtype"):
            raise ModuleError(
                "mixed_precision takes a MixedPrecision",
                seen=f"{given!r}",
                fix="Write mixed_precision=dure.MixedPrecision(param_dtype=torch.bfloat16).",
            )
        return cls(
            param_dtype=given.param_dtype,
            reduce_dtype=given.reduce_dtype,
            buffer_dtype=given.buffer_dtype,
        )

    @property
    def gradients(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced; None means that of each parameter."""
        return self.reduce_dtype or self.param_dtype

    @property
    def computes(self) -> bool:
        """Whether forward is any different from that of the module itself."""
        return self.param_dtype is not None or self.buffer_dtype is not None


class ComputeCopies:
    """The low-precision side of one module; see the module's text.

    Threads:
        Used by the thread that runs forward, and by the one that runs its backward.

    Args:
        module: The module that computes.
        precision: In what.
        ignored: Paths of parameters and buffers to leave alone.
    """

    def __init__(self, module: nn.Module, precision: MixedPrecision, ignored: set[str]) -> None:
        self.precision = precision
        self._ignored = {
            t
            for path, t in [*module.named_parameters(), *module.named_buffers()]
            if path in ignored
        }
        self._borders: list[nn.Module] = []
        self._modules = list(self._computing(module))
        self._backward: ExitStack | None = None

    def _computing(self, root: nn.Module) -> Iterator[nn.Module]:
        """Go through the modules that compute in low precision; note where the others begin."""
        names = set(self.precision.modules_to_ignore)
        unknown = names - {path for path, _ in root.named_modules()}
        if unknown:
            raise ModuleError(
                "mixed_precision ignores modules that do not exist",
                parameters=tuple(sorted(unknown)),
                seen=", ".join(sorted(unknown)),
                fix="Give paths as module.named_modules() does.",
            )
        left_out: set[nn.Module] = set()
        for path, module in root.named_modules():
            if module in left_out:
                continue
            if path in names or isinstance(module, self.precision.module_classes_to_ignore):
                left_out.update(module.modules())
                if not isinstance(module, _MIXED_INSIDE):
                    self._borders.append(module)
            else:
                yield module

    # ---------------------------------------------------------------- running

    def run(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `module` in low precision."""
        if not autograd_hooks.in_backward():
            self._end_backward()  # one that raised, and that something keeps alive
        dtype = self.precision.param_dtype
        if dtype is not None and self.precision.cast_forward_inputs:
            inputs, kwargs = cast_floats(inputs, dtype), cast_floats(kwargs, dtype)
        copies: dict[torch.Tensor, torch.Tensor] = {}
        with self.shadowed(copies):
            outputs = module(*inputs, **kwargs)

        autograd_hooks.on_outputs(outputs, lambda _: self._begin_backward(copies))
        return outputs

    def _begin_backward(self, copies: dict[torch.Tensor, torch.Tensor]) -> None:
        """Put the copies of a forward back in place until the backward that is running ends."""
        if self._backward is not None:
            return
        self._backward = stack = ExitStack()
        with torch.enable_grad():
            stack.enter_context(self.shadowed(copies))

        def end() -> None:
            if self._backward is stack:
                self._end_backward()

        autograd_hooks.at_end_or_failure(end)

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._backward.close()
            self._backward = None

    # ---------------------------------------------------------------- shadows

    @contextmanager
    def shadowed(self, copies: dict[torch.Tensor, torch.Tensor]) -> Iterator[None]:
        """Let the modules find low-precision copies instead of their parameters and buffers.

        Args:
            copies: Copies made before, by parameter; missing ones are made and added.
        """
        with ExitStack() as undo:
            if self.precision.param_dtype is not None:
                for module in self._modules:
                    self._shadow_parameters(module, copies, self.precision.param_dtype, undo)
                for module in self._borders:
                    _guard_border(module, self.precision.param_dtype, undo)
            if self.precision.buffer_dtype is not None:
                for module in self._modules:
                    self._exchange_buffers(module, self.precision.buffer_dtype, undo)
            yield

    def _shadow_parameters(
        self,
        module: nn.Module,
        copies: dict[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
        undo: ExitStack,
    ) -> None:
        attributes = module.__dict__
        for name, parameter in module._parameters.items():  # pyright: ignore[reportPrivateUsage]
            if parameter is None or not self._is_cast(parameter, dtype):
                continue
            if parameter not in copies:
                copies[parameter] = parameter.to(dtype)
            undo.callback(_restore, attributes, name, attributes.get(name, _ABSENT))
            attributes[name] = copies[parameter]
        weights = attributes.get("_flat_weights")  # recurrent layers keep a list besides
        if isinstance(weights, list):
            undo.callback(_restore, attributes, "_flat_weights", weights)
            attributes["_flat_weights"] = [
                copies.get(w, w) if isinstance(w, nn.Parameter) else w
                for w in cast("list[object]", weights)
            ]

    def _exchange_buffers(self, module: nn.Module, dtype: torch.dtype, undo: ExitStack) -> None:
        buffers = module._buffers  # pyright: ignore[reportPrivateUsage]
        for name, buffer in list(buffers.items()):
            if buffer is None or not self._is_cast(buffer, dtype):
                continue
            copy = buffer.detach().to(dtype)
            undo.callback(_carry_over, buffers, name, buffer, copy, copy._version)
            buffers[name] = copy

    def _is_cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        wanted = tensor.is_floating_point() and tensor.dtype != dtype
        return wanted and tensor not in self._ignored


def _restore(attributes: dict[str, Any], name: str, before: object) -> None:
    """Take a shadow away."""
    if before is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = before


def _carry_over(
    buffers: dict[str, torch.Tensor | None],
    name: str,
    buffer: torch.Tensor,
    copy: torch.Tensor,
    version: int,
) -> None:
    """Put a buffer back, with what was written to its copy, or assigned in its place."""
    now = buffers.get(name)
    buffers[name] = buffer
    if isinstance(now, torch.Tensor) and (now is not copy or now._version != version):
        with torch.no_grad():
            if now.shape == buffer.shape:
                buffer.copy_(now)
            else:
                buffers[name] = now.to(buffer.dtype)


def _guard_border(module: nn.Module, dtype: torch.dtype, undo: ExitStack) -> None:
    """Cast what enters an ignored module to its own dtype, and what leaves it to `dtype`."""
    own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)

    def enter(
        _: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast_floats(inputs, own), cast_floats(kwargs, own)

    def leave(_: nn.Module, __: object, outputs: object) -> object:
        return cast_floats(outputs, dtype)

    undo.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
    undo.callback(module.register_forward_hook(leave).remove)
