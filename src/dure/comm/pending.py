"""Results that are waited for at their first use, and are ordinary tensors from then on.

A functional collective returns at once, with a tensor that the operation still writes. Until it is
complete the tensor's Python class is `AsyncCollectiveTensor`: every function that reads its values
first calls `__torch_function__`, which waits, and restores the ordinary class. So the first use
waits once, and later uses cost nothing. The tensor's memory, its place in autograd's graph and its
identity never change, and functions that only read shape, dtype or the state of autograd do not
wait.

A compiled function that is called with a pending tensor runs uncompiled, then and later;
`wait_tensor` before the call prevents that.

A result may be dropped before it is complete: the backend keeps the memory of pending operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dure import torch_private
from dure.comm.untraced import untraced_here
from dure.comm.work import Work

_NOT_WAITED_FOR = (
    "a tensor is the result of a functional collective that is still pending: call "
    "dure.comm.functional.wait_tensor before passing it to compiled code"
)


class AsyncCollectiveTensor(torch.Tensor):
    """A tensor that a collective is writing; it becomes a `torch.Tensor` when it is first used.

    If the operation failed, its error is raised where the tensor is used, at every use.

    Threads:
        Any thread may use it.

    Obtained from:
        The functions of `dure.comm.functional` and `DTensor.redistribute(async_op=True)`.
    """

    _work: Work

    def wait(self) -> torch.Tensor:
        """Wait for the values; return this tensor, which is now an ordinary one."""
        return wait_tensor(self)

    trigger_wait = wait

    @classmethod
    @partial(untraced_here, reason=_NOT_WAITED_FOR)
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait, then run `func` on tensors that are now ordinary ones."""
        if func in _METADATA:
            with torch_private.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        _wait_for_each(args)
        if kwargs:
            _wait_for_each(kwargs.values())
        return func(*args, **(kwargs or {}))


def _properties(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


_METADATA: frozenset[Any] = frozenset(
    _properties("dtype", "device", "layout", "shape", "ndim", "nbytes", "itemsize", "is_sparse")
    | _properties("is_cuda", "is_cpu", "is_meta", "is_quantized", "is_nested")
    | _properties("requires_grad", "grad_fn", "is_leaf", "output_nr", "retains_grad", "_version")
    | {torch.Tensor.requires_grad.__set__}  # pyright: ignore
    | {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement}
    | {torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.element_size}
    | {torch.Tensor.is_contiguous, torch.Tensor.is_floating_point, torch.Tensor.is_complex}
    | {torch.Tensor.__hash__, torch.Tensor.register_hook, torch.Tensor.retain_grad}
    | {torch.is_floating_point, torch.is_complex, torch.numel}
)
"""Functions that do not read a tensor's values."""


@untraced_here
def _wait_for_each(values: Iterable[Any]) -> None:
    """Wait for every pending tensor in `values`, also in nested lists and dicts."""
    for value in values:
        if isinstance(value, AsyncCollectiveTensor):
            wait_tensor(value)
        elif isinstance(value, (list, tuple)):
            _wait_for_each(value)  # pyright: ignore
        elif isinstance(value, dict):
            _wait_for_each(value.values())  # pyright: ignore


def pending(tensor: torch.Tensor, work: Work) -> torch.Tensor:
    """Make the first use of `tensor` wait for `work`, which writes it."""
    work.disown()  # the tensor may be dropped without a warning
    work.drop_outputs()
    tensor.__class__ = AsyncCollectiveTensor
    tensor._work = work  # pyright: ignore
    return tensor


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """Let a program call `wait` on a result that is already available."""
    if type(tensor) is torch.Tensor:
        tensor.__class__ = AsyncCollectiveTensor
    return tensor


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a functional collective's result; return the same tensor, with its values.

    Args:
        tensor: The result of a functional collective; any other tensor is returned as it is.

    Raises:
        CommError: The operation failed.

    Example:
        ```python
        from dure.comm import functional as funcol

        total = funcol.wait_tensor(funcol.all_reduce(torch.ones(1), "sum", None))
        assert total.item() == 2.0
        ```
    """
    if isinstance(tensor, AsyncCollectiveTensor):
        state: dict[str, Work] = vars(tensor)
        work = state.get("_work")  # None if another thread has waited in the meantime
        if work is not None:
            work.wait()
        torch.Tensor.__setattr__(tensor, "__class__", torch.Tensor)
        state.pop("_work", None)
    return tensor
