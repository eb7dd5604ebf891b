"""The one small interface behind which every backend lives.

`ProcessGroup` (comm/group.py) has done the following before it calls a backend, so that no backend
does it again: this rank is a member; tensors are dense, contiguous, on a device of the backend, and
of the right number and length as far as this rank alone can know; the reduction has a meaning for
the dtype; complex numbers are passed as they are; PREMUL_SUM has been turned into SUM.
Ranks are group ranks. In-place use (`output` the very memory of `input`, or the right part of it)
is allowed wherever MPI allows MPI_IN_PLACE.

What a backend owes in return:

* With ``async_op=False`` a call returns None when it is done, or raises a `DureError`.
* With ``async_op=True`` it returns a `Ticket` at once; it must not block on any peer.
* Collectives happen in the order of the calls. Point-to-point is independent of collectives.
* `send` may complete before the matching `recv` was posted; it must not need it for isend.
* Reductions run in the order of ranks; 16 and 8 bit floats accumulate in float32, rounded once.
* Zero-size tensors are ordinary calls (they still synchronise where the operation does).
* A pending or later call never hangs: `CommTimeout` at the group's timeout (with `missing`),
  `PeerLost`, `Desync` or `Aborted`.

Thread safety: calls on one backend may come from any thread, one at a time; `Ticket` methods and
`close` from any thread at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch

from dure.comm.ops import ReduceOp
from dure.errors import DureError
from dure.store.base import Store

__all__ = ["Backend", "BackendFactory", "BackendOptions", "PlainBackend", "PlainCalls", "Ticket"]


class Ticket(Protocol):
    """A pending operation."""

    @property
    def source(self) -> int:
        """Group rank of the sender of a finished receive; -1 otherwise."""
        ...

    def done(self) -> bool:
        """Tell, without blocking, whether the operation ended (well or badly)."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it ended; raise its error, if it has one.

        Returns:
            True if it ended; False if `timeout_s` passed first (the operation goes on).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """What a backend is made from.

    Attributes:
        store: This group's own key space, shared by its ranks.
        rank: Group rank of this process.
        size: Ranks in the group.
        global_ranks: Global rank of each group rank.
        timeout: How long an operation may wait for its peers.
        name: The group's name, the same on all ranks.
        device_id: The device the rank is bound to, if it said so.
        patience: How long an operation may take whose time somebody else keeps, who also says who
            left; None: the group keeps its time, and its ranks tell each other.
        threads: Threads of each rank that compute while it waits, its own included: ranks spin only
            where the host has cores for all of them.
        pg_options: What the user gave as `pg_options` or `backend_options`, untouched.
    """

    store: Store
    rank: int
    size: int
    global_ranks: tuple[int, ...]
    timeout: timedelta
    name: str
    device_id: torch.device | None = None
    patience: timedelta | None = None
    threads: int = 1
    pg_options: object = None
    extra: dict[str, object] = field(default_factory=dict)


class Backend(Protocol):
    """A set of ranks that can talk (see the module's text for the contract)."""

    name: str
    """As users name it: "shm", "threads", "gloo", "nccl"."""
    device_types: frozenset[str]
    """Types of `torch.device` whose tensors it takes."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Ticket | None:
        """Reduce `tensor` [*] of all ranks, in place, on all ranks."""
        ...

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, async_op: bool) -> Ticket | None:
        """Reduce `tensor` [*] of all ranks into that of `dst`; the others' stay as they are."""
        ...

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool) -> Ticket | None:
        """Copy `tensor` [*] of `src` to all."""
        ...

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """Copy rank i's `tensor` to `outputs[i]` on all ranks; lengths may differ between ranks."""
        ...

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """Copy rank i's `tensor` [k] to `output` [n*k] at i*k on all ranks."""
        ...

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        dst: int,
        async_op: bool,
    ) -> Ticket | None:
        """Copy rank i's `tensor` to `outputs[i]` on `dst` (None elsewhere)."""
        ...

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        src: int,
        async_op: bool,
    ) -> Ticket | None:
        """Copy `inputs[i]` of `src` (None elsewhere) to rank i's `tensor`."""
        ...

    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """Reduce `inputs[i]` of all ranks into rank i's `tensor`; lengths may differ with i."""
        ...

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """Reduce part i [k] of `tensor` [n*k] of all ranks into rank i's `output` [k]."""
        ...

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> Ticket | None:
        """Copy `inputs[j]` of rank i to `outputs[i]` of rank j."""
        ...

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """Copy part j [k] of rank i's `tensor` [n*k] to part i of rank j's `output` [n*k]."""
        ...

    def barrier(self, async_op: bool) -> Ticket | None:
        """Return when all ranks have called."""
        ...

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Ticket | None:
        """Send `tensor` [*] to `dst`; messages of one pair and tag arrive in order."""
        ...

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Ticket:
        """Receive into `tensor` from `src`, or from anyone; a finished ticket where not async."""
        ...

    def shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """Allocate `nbytes` (uint8, zeroed) that peers can reach directly; all ranks call alike.

        Returns:
            The tensor, or None where the backend has no such memory.
        """
        ...

    def host_shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """Allocate `nbytes` (uint8, zeroed), the same memory on all ranks of a host.

        Returns:
            The tensor, or None where the ranks share no memory.
        """
        ...

    def close(self, abort: bool) -> None:
        """Leave: pending operations end with `Aborted`; peers see that this rank left.

        With ``abort=False`` the caller promises that no operation of its own is pending, and
        peers that still finish the last common operation must not be disturbed.
        """
        ...


class PlainCalls(Protocol):
    """Synchronous calls on tensors as they come, which the group has not looked at.

    Each returns True when done, False when the tensors are not as simple as they could be (then
    nothing has happened), or else what went wrong, for `PlainBackend.error`.
    """

    def plain_all_reduce(self, tensor: object, op: object, /) -> object:
        """Reduce in place."""
        ...

    def plain_broadcast(self, tensor: object, root: int, /) -> object:
        """Copy the root's tensor to all."""
        ...

    def plain_all_gather(self, output: object, tensor: object, /) -> object:
        """Gather into one tensor."""
        ...

    def plain_reduce_scatter(self, output: object, tensor: object, op: object, /) -> object:
        """Reduce part i of one tensor into rank i's."""
        ...

    def plain_all_to_all(self, output: object, tensor: object, /) -> object:
        """Exchange equal parts."""
        ...

    def plain_barrier(self) -> object:
        """Meet."""
        ...

    def plain_send(self, tensor: object, to: int, tag: int, /) -> object:
        """Send to group rank `to`."""
        ...

    def plain_receive(self, tensor: object, source: int, tag: int, /) -> object:
        """Receive from group rank `source`."""
        ...


class PlainBackend(Protocol):
    """What a backend has besides, if it takes plain calls."""

    plain: PlainCalls

    def error(self, outcome: object) -> DureError:
        """Make the exception for what a plain call returned."""
        ...


BackendFactory = Callable[[BackendOptions], Backend]
