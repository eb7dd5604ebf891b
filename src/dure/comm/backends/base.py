"""The interface of all backends.

`ProcessGroup` (comm/group) has checked the following before it calls a backend: this rank is a
member; tensors are dense, contiguous, on a device of the backend, and of the right number and
length as far as this rank alone can know; the reduction is defined for the dtype. Complex numbers
are passed unchanged. PREMUL_SUM has been turned into SUM, and a reduce_scatter into another dtype
into one of float32, unless the backend has a true attribute `fuses`: then it takes premultiplied
sums by a number, and `ops.CONVERSIONS`. A backend that compares the ranks' calls before data move
has a true attribute `compares_calls`. Ranks are group ranks. In-place use (an output is the memory
of an input, or the right part of it) is allowed wherever MPI allows MPI_IN_PLACE.

A backend guarantees:

* With ``async_op=False`` a call returns None when it is done, or raises a `DureError`.
* With ``async_op=True`` it returns a `Request` at once; it must not block on any peer.
* Collectives happen in the order of the calls. Point-to-point is independent of collectives.
* `send` may complete before the matching `recv` was posted; it must not need it for isend.
* Reductions run in the order of ranks; 16 and 8 bit floats accumulate in float32, rounded once
  (over nccl, floats of 16 bits as NCCL does).
* Zero-size tensors are ordinary calls (they still synchronize where the operation does).
* A pending or later call never hangs: `CommTimeout` at the group's timeout (with `missing`),
  `PeerLost`, `Desync` or `Aborted`.

Dure's backends take CPU tensors, except nccl. `staged.StagedBackend` makes a backend for tensors of
an accelerator of one for CPU tensors.

Thread safety: calls on one backend may come from any thread, one at a time; `Request` methods and
`close` from any thread at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from dure.comm.backends.request import Request
from dure.comm.call import Call
from dure.errors import DureError
from dure.native import Channel
from dure.store.base import Store
from dure.store.gathering import Gathering, gather_all


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """The arguments from which a backend is made.

    Attributes:
        store: This group's own key space, shared by its ranks.
        rank: Group rank of this process.
        size: Ranks in the group.
        global_ranks: Global rank of each group rank.
        timeout: How long an operation may wait for its peers.
        name: The group's name, the same on all ranks.
        hosts: Where each rank lives, equal for ranks that can share memory; empty: not known.
        device_id: The device the rank is bound to, if it said so.
        op_timeout: The limit of one operation, if another backend that uses this one enforces
            `timeout` and reports the ranks that left. None: this backend does both.
        threads: Threads of each rank that compute while it waits, its own included: ranks spin only
            if the host has cores for all of them.
        eager_bytes: A send of more bytes waits until it is received; with 0 every send does. None:
            the backend decides. Tests set it to find deadlocks.
        pg_options: The `pg_options` or `backend_options` of the program.
        all_bound: Whether every rank has said which device it is bound to.

    Obtained from:
        `register_backend`: its factory receives them for each group.
    """

    store: Store
    rank: int
    size: int
    global_ranks: tuple[int, ...]
    timeout: timedelta
    name: str
    hosts: tuple[str, ...] = ()
    device_id: torch.device | None = None
    op_timeout: timedelta | None = None
    threads: int = 1
    eager_bytes: int | None = None
    pg_options: object = None
    all_bound: bool = False

    def tell_all(self, what: str, said: str | bytes = "") -> list[bytes]:
        """Publish a value in the store; return the values of all ranks, by group rank.

        Args:
            what: Name of the value; each can be used once.
            said: This rank's value.

        Raises:
            RendezvousTimeout: A rank did not call within the group's timeout.
            RendezvousError: A rank has failed or was interrupted.

        Collective:
            All ranks of the group call.

        Cost:
            4 requests to the store, and the values of all ranks (see `store.gathering`).
        """
        gathering = Gathering(self.store, what, self.rank, self.size, group=self.name)
        return gather_all(gathering, said, self.timeout)


class Backend(Protocol):
    """A set of ranks that can communicate (see the module's text for the contract).

    Obtained from:
        A custom one is made by the factory that `register_backend` is given.
    """

    name: str
    """The name that programs pass: "shm", "threads", "gloo", "nccl"."""
    device_types: frozenset[str]
    """Types of `torch.device` whose tensors it takes."""

    def run(self, call: Call, async_op: bool) -> Request | None:
        """Run a collective; `comm.call` defines the inputs and outputs of each."""
        ...

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Request | None:
        """Send `tensor` [*] to `dst`; messages of one pair and tag arrive in order."""
        ...

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Request:
        """Receive into `tensor` from `src`, or from any rank; finished if not asynchronous."""
        ...

    def allocate(self, nbytes: int, node_shared: bool) -> torch.Tensor | None:
        """Allocate `nbytes` (uint8, zeroed).

        Args:
            nbytes: How many, more than none.
            node_shared: If True, one block of memory for all ranks of a host, which all call. If
                False, memory of this rank that its peers can read directly; no other rank calls.

        Returns:
            The tensor, or None if the backend has no such memory.
        """
        ...

    def close(self, abort: bool) -> None:
        """Leave: pending operations end with `Aborted`; peers see that this rank left.

        Operations that run in a stream end first, unless `abort` is set.

        With ``abort=False`` the caller promises that no operation of its own is pending, and
        peers that still finish the last common operation must not be disturbed.
        """
        ...


class PlainBackend(Protocol):
    """The additional interface of a backend that takes plain calls."""

    plain: Channel
    """The plain calls of channel 0."""

    def plain_on(self, channel: int) -> Channel:
        """Return those of one channel."""
        ...

    def error(self, outcome: object) -> DureError:
        """Make the exception for the outcome that a plain call returned."""
        ...


def channel_name(group: str, channel: int) -> str:
    """Return the name of a channel in errors and records; that of channel 0 is the group's."""
    return f"{group}[{channel}]" if channel else group


BackendFactory = Callable[[BackendOptions], Backend]
