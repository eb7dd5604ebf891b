"""Random numbers for threads that run at the same time.

All threads of a process draw CPU random numbers from one generator, in whatever order they happen
to arrive: with two replicas in two threads, which dropout mask goes to which would change from run
to run. `OwnRandom` has the functions below, called in the thread that entered it, draw from a
separate generator. Operators that bypass torch's Python functions (attention with
`dropout_p`, dropout inside recurrent layers) still draws from the common one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["OwnRandom"]

# Each takes a generator= argument.
_DRAWING: set[Callable[..., Any]] = {
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.randperm,
    torch.Tensor.bernoulli,
    torch.Tensor.bernoulli_,
    torch.Tensor.exponential_,
    torch.Tensor.multinomial,
    torch.Tensor.normal_,
    torch.Tensor.random_,
    torch.Tensor.uniform_,
}
_LIKE: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    torch.rand_like: torch.Tensor.uniform_,
    torch.randn_like: torch.Tensor.normal_,
}
# How many dimensions a batch has for the dropouts that drop complete channels, [N, C, ...].
_CHANNELS: dict[Callable[..., Any], int] = {
    functional.dropout1d: 3,
    functional.dropout2d: 4,
    functional.dropout3d: 5,
}


class OwnRandom(TorchFunctionMode):
    """Have the calling thread draw CPU random numbers from a generator of its own, in a `with`.

    Threads:
        A mode belongs to the thread that enters it.

    Args:
        seed: Of the generator.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, with the generator if it draws."""
        kwargs = kwargs or {}
        if func in _DRAWING:
            if "generator" not in kwargs and _is_on_cpu(args, kwargs):
                kwargs = {**kwargs, "generator": self._generator}
        elif func in _LIKE and _is_on_cpu(args, kwargs):
            drawn = torch.empty_like(*args, **{**kwargs, "requires_grad": False})
            _LIKE[func](drawn, generator=self._generator)
            return drawn.requires_grad_(kwargs.get("requires_grad", False))
        elif (func is functional.dropout or func in _CHANNELS) and _is_on_cpu(args, kwargs):
            return self._dropout(func, *args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self,
        func: Callable[..., torch.Tensor],
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        """Drop elements, or channels, by a mask that this thread draws."""
        batched = input.dim() == _CHANNELS.get(func, input.dim())
        if not training or not 0.0 < p < 1.0 or not batched:
            return func(input, p, training, inplace)
        shape = list(input.shape)
        if func in _CHANNELS:
            shape[2:] = [1] * (len(shape) - 2)
        mask = torch.empty(shape, dtype=input.dtype, device=input.device)
        mask.bernoulli_(1.0 - p, generator=self._generator).div_(1.0 - p)
        return input.mul_(mask) if inplace else input * mask


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether the numbers are drawn on the CPU."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "cpu"
    first = args[0] if args else kwargs.get("input")
    return first.device.type == "cpu" if isinstance(first, torch.Tensor) else True
