"""How the shards of a group of parameters become whole, and gradients become shards.

Two ways, behind one interface. *shared*: the ranks of a host have the parameters in memory that
they share; a shard is a view into it, and nothing is gathered (shared.py). *gathered*: the usual
all_gather into memory of a rank's own (gathered.py). `fully_shard` chooses (choosing.py);
`strategy("gathered")` or DURE_FSDP_STRATEGY forces one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from dure import env
from dure.errors import PeerLost, UsageError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.comm.ops import ReduceOp
    from dure.comm.work import Work

__all__ = [
    "CustomAllGather",
    "CustomReduceScatter",
    "Reduction",
    "Strategy",
    "forced",
    "strategy",
]

NAMES = ("shared", "gathered")
_forced: ContextVar[str | None] = ContextVar("dure_fsdp_strategy", default=None)


@dataclass(slots=True)
class Reduction:
    """How gradients of a group are reduced; methods of `FSDPModule` change it.

    Attributes:
        dtype: In which; None for that of the gradients.
        divisor: What the sum is divided by; None for the number of ranks.
        force_sum: Use a plain sum and a division instead of the collective's average.
        replicate: Reduce over the axis of replicas, too, at this backward.
        hook: Called with the reduced parts of a group's gradients, flat, which it may change.
    """

    dtype: torch.dtype | None = None
    divisor: float | None = None
    force_sum: bool = False
    replicate: bool = True
    hook: Callable[[torch.Tensor], object] | None = None


class Allocator(Protocol):
    """What a program's own collectives have besides."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory [size], for the input or the output; its values may be any."""
        ...


class CustomAllGather(Allocator, Protocol):
    """A program's own all_gather, as torch's `AllGather`; see `set_custom_all_gather`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        """Gather [k] of each rank into [n * k]; return what waits for it, or None if it is done."""
        ...


class CustomReduceScatter(Allocator, Protocol):
    """A program's own reduce_scatter, as torch's `ReduceScatter`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> Work | None:
        """Reduce [n * k] of each rank to this rank's [k]; return what waits, or None."""
        ...


class Strategy(Protocol):
    """What makes one group's parameters whole. All parameters have one dtype.

    Collective: `unshard` and `reduce`, on all ranks of the group in the same order; `enter`.
    """

    name: str
    reducing_group: ProcessGroup
    custom_reduce_scatter: CustomReduceScatter | None

    def attach(self) -> None:
        """Take the shards that the parameters have now: first, and whenever some were replaced."""
        ...

    def publish(self) -> None:
        """Put what others are to read where they read it; `enter` comes next."""
        ...

    def enter(self) -> None:
        """Begin to read, unless begun: a root's forward, or a backward. Wait until all have."""
        ...

    def leave(self, together: bool) -> None:
        """End it: this rank reads no more; with `together`, wait until no rank does."""
        ...

    def before_write(self) -> None:
        """Wait until shards may be written, where that is between no steps."""
        ...

    def recomputed(self) -> Sequence[torch.Tensor]:
        """Return memory of this rank's that `publish` writes anew before it is read."""
        ...

    def check_unwritten(self) -> None:
        """Raise if shards were written since `enter`, where others read them."""
        ...

    def is_stale(self) -> bool:
        """Whether any rank's shards were written since the wholes, which were kept, were made.

        Collective: all ranks of the group.
        """
        ...

    def tell(self, error: PeerLost) -> None:
        """Add to an error what a rank's death has left of the parameters."""
        ...

    def unshard(self) -> ProcessGroup | None:
        """Begin to make the parameters whole; nothing if they are, or have begun to be.

        Returns:
            The group in which an all_gather was begun.
        """
        ...

    def wait(self) -> Sequence[torch.Tensor]:
        """Return the wholes, each [whole_shape] of its `dtype`; always the same tensors."""
        ...

    def reshard(self, for_backward: bool = False) -> None:
        """The wholes are not read until `unshard` comes again.

        Args:
            for_backward: That is in this step's backward: what makes it cheaper may be kept.
        """
        ...

    def reduce(
        self, gradients: Sequence[torch.Tensor | None], how: Reduction
    ) -> Callable[[], Sequence[torch.Tensor | None]]:
        """Begin to reduce gradients of wholes; None is a rank that has none, which counts as zeros.

        Returns:
            What waits, and returns this rank's parts; None where no rank had a gradient.
        """
        ...


@contextmanager
def strategy(name: str) -> Iterator[None]:
    """Have `fully_shard` use one strategy, whatever it would choose.

    Args:
        name: "shared" or "gathered".

    Raises:
        UsageError: No such strategy. `fully_shard` raises where "shared" cannot be.
    """
    token = _forced.set(_checked(name))
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    """Return the strategy that the program or the environment asks for."""
    name = _forced.get() or env.text("DURE_FSDP_STRATEGY")
    return _checked(name) if name else None


def _checked(name: str) -> str:
    if name not in NAMES:
        raise UsageError(
            "no such strategy", op="fsdp.strategy", seen=f"{name!r}; there are {', '.join(NAMES)}"
        )
    return name
