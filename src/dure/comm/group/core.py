"""What every operation of a process group shares: membership, and the road it takes.

Every operation takes the same road:

1. *check*: what this rank alone can know to be wrong raises here, before anything is sent;
2. *plain memory*: tensors the backend cannot take as they are (strided views, conjugates) are
   copied to contiguous ones, and results copied back once the operation has ended;
3. *issue*: the operation gets its number in the group and its trace event, and the backend runs
   it, at once or, with ``async_op=True``, behind the `Work` that is returned.

A *plain* call skips all three: a synchronous one on plain tensors (contiguous ones on the CPU, of a
real dtype) that nobody traces goes straight to the engine, which makes the same checks in one look
at the tensor (csrc/bindings/plain.cpp). What it finds not to be plain takes the road above.

Every operation is noted by the flight recorder (`trace.flight`): by the backend where it keeps a
ring of its own (it has a method `records`), else here.

Ranks are group ranks here; the public functions of `collectives` and `point_to_point` translate
global ranks on one line each.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import cast

import torch

from dure import trace
from dure.comm import checks
from dure.comm.backends.base import Backend, PlainBackend, PlainCalls, Ticket
from dure.comm.work import Work
from dure.errors import DureError, NotInGroupError, ShapeError, UsageError
from dure.store.base import Store
from dure.trace import flight

__all__ = ["GroupCore"]


class GroupCore:
    """Who is in a group, and how an operation of it is checked, numbered, traced and run.

    All ranks must call the collectives of a group in the same order. Groups are independent of
    each other, and point-to-point messages are independent of collectives.

    Threads: one operation at a time; `Work` objects may be used from any thread. Tensors belong to
    an operation until it has ended.

    Attributes:
        name: The same on all ranks.
        global_ranks: Global rank of each group rank.
        timeout: How long an operation waits for its peers.
        store: The group's own key space.
        device_types: Kinds of device whose tensors it takes.
        desc: What the group is for, as the user described it.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        global_ranks: tuple[int, ...],
        backends: dict[str, Backend],
        store: Store,
        timeout: timedelta,
        desc: str = "",
    ) -> None:
        self.group_name, self._rank, self.global_ranks = name, rank, global_ranks
        self.timeout, self.store, self.desc = timeout, store, desc or name
        self.seq = 0
        self._num_monitored = 0
        self._num_attempts = 0
        self._size = len(global_ranks)
        self._group_rank_of = {g: r for r, g in enumerate(global_ranks)}
        self._backends = backends
        self.device_types = frozenset(backends)
        self._only: Backend | None = next(iter(backends.values())) if len(backends) == 1 else None
        self._engine: PlainCalls | None = getattr(self._only, "plain", None)
        self._plain = self._engine
        self._coalesced: list[Work] | None = None
        self.closed = False
        self._ring, self._ring_devices = self._open_ring()

    def _open_ring(self) -> tuple[flight.FlightRing | None, frozenset[str]]:
        """Make a flight recorder for the devices whose backend has none of its own."""
        without = {d: b for d, b in self._backends.items() if not hasattr(b, "records")}
        if not without:
            return None, frozenset()
        names = ",".join(dict.fromkeys(b.name for b in without.values()))
        ring = flight.FlightRing(
            flight.Origin(
                group=self.group_name,
                rank=self._rank,
                global_ranks=self.global_ranks,
                backend=names,
            )
        )
        flight.add_source(ring)
        return ring, frozenset(without)

    def __repr__(self) -> str:
        return (
            f"ProcessGroup({self.group_name!r}, rank {self._rank} of {self._size}, "
            f"{self.backend_name})"
        )

    # ---------------------------------------------------------------- who is in it

    def rank(self) -> int:
        """Return this rank's number within the group."""
        return self._rank

    def size(self) -> int:
        """Return how many ranks the group has."""
        return self._size

    def name(self) -> str:
        """Return the backend's name (the group's own is `group_name`)."""
        return self.backend_name

    @property
    def backend_name(self) -> str:
        """Name of the backend, or a list such as "cpu:gloo,cuda:nccl"."""
        names = {b.name for b in self._backends.values()}
        return names.pop() if len(names) == 1 else self.backend_config

    @property
    def backend_config(self) -> str:
        """Which backend serves which kind of device, such as "cpu:shm"."""
        return ",".join(f"{d}:{b.name}" for d, b in sorted(self._backends.items()))

    def group_rank(self, global_rank: int) -> int:
        """Return the group rank of `global_rank`."""
        try:
            rank = self._group_rank_of.get(global_rank)
        except TypeError:  # a list, say
            rank = None
        if rank is None:
            raise NotInGroupError(
                f"global rank {global_rank!r} is not in the group",
                group=self.group_name,
                seen=f"its members are {list(self.global_ranks)}",
            )
        return rank

    def peer(self, global_rank: int | None, group_rank: int | None, op: str, what: str) -> int:
        """Return the group rank meant by a pair of arguments such as `src` and `group_src`."""
        if group_rank is None and type(global_rank) is int:
            rank = self._group_rank_of.get(global_rank)
            if rank is not None:
                return rank
        if (global_rank is None) == (group_rank is None):
            raise UsageError(
                f"give either {what} (a global rank) or group_{what} (a rank of the group)",
                op=op,
                group=self.group_name,
            )
        if global_rank is not None:
            return self.group_rank(global_rank)
        assert group_rank is not None
        if group_rank not in range(self._size):
            raise NotInGroupError(
                f"group_{what}={group_rank!r} is not a rank of the group",
                op=op,
                group=self.group_name,
                seen=f"its ranks are 0 to {self._size - 1}",
            )
        return group_rank

    def next_monitored(self) -> int:
        """Return the number of this rank's next monitored barrier."""
        self._num_monitored += 1
        return self._num_monitored

    def next_attempt(self) -> int:
        """Return the number of this rank's next attempt to shrink the group."""
        self._num_attempts += 1
        return self._num_attempts

    def renumber(self, global_ranks: tuple[int, ...]) -> None:
        """Give the members new global ranks, in the same order."""
        flight.renumber(self.group_name, self.global_ranks[self._rank], global_ranks)
        self.global_ranks = global_ranks
        self._group_rank_of = {g: r for r, g in enumerate(global_ranks)}

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long operations wait for their peers, where the backend can change it."""
        self.timeout = timeout
        for backend in self._backends.values():
            change = getattr(backend, "set_timeout", None)
            if change is not None:
                change(timeout)

    def gone(self, rank: int) -> bool:
        """Tell whether `rank` is known to have died, or left; backends that cannot know say no."""
        return self._ask("gone", rank)

    def silent(self, rank: int) -> bool:
        """Tell whether `rank` may live and cannot be heard of; backends that cannot know say no."""
        return self._ask("silent", rank)

    def severed(self, rank: int) -> bool:
        """Tell whether the host of `rank` fell silent; backends that cannot know say no."""
        return self._ask("severed", rank)

    def _ask(self, question: str, rank: int) -> bool:
        asked = [getattr(backend, question, None) for backend in self._backends.values()]
        return any(answer is not None and answer(rank) for answer in asked)

    # ---------------------------------------------------------------- the road of every operation

    def _backend(self, op: str, *tensors: torch.Tensor) -> Backend:
        """Check that the group is open and the tensors reachable; return the backend for them."""
        if self.closed:
            raise UsageError(
                "the process group has been destroyed",
                op=op,
                group=self.group_name,
                rank=self._rank,
                fix="Create a new group; do not keep one across destroy_process_group().",
            )
        for t in tensors:
            checks.check_tensor(t, op, self.device_types)
        if self._only is not None:
            return self._only
        kind = tensors[0].device.type if tensors else min(self._backends)
        return self._backends[kind]

    def _issue(
        self,
        op: str,
        call: Callable[[bool], Ticket | None],
        outputs: list[torch.Tensor],
        *,
        finish: checks.Finish | None = None,
        async_op: bool = False,
        data: torch.Tensor | None = None,
        peer: int | None = None,
        detail: str | int | None = None,
    ) -> Work | None:
        """Run a checked operation: number it, trace it, and hand out a `Work` if it is wanted.

        `detail` is the name of the reduction, or the tag of a message.
        """
        self.seq += 1
        coalesced = self._coalesced
        deferred = async_op or coalesced is not None
        event = self._begin(op, data, peer, deferred) if trace.hooks else None
        noted = None
        if self._ring is not None and (self._only or self._kind(data) in self._ring_devices):
            noted = self._ring.begin(op, data, peer, detail, deferred)
        ended = partial(self._ended, event, noted)
        try:
            ticket = call(deferred)
            if not deferred and finish is not None:
                finish()
        except BaseException as error:
            ended(error)
            raise
        if not deferred:
            ended(None)
            return None
        work = Work(
            ticket,
            outputs,
            finish=finish,
            keep=call,
            fields={"op": op, "seq": self.seq, "group": self.group_name, "rank": self._rank},
            source_of=self.global_ranks.__getitem__,
            settled=ended,
        )
        if coalesced is not None:
            coalesced.append(work)
        return work

    @property
    def coalesced(self) -> list[Work] | None:
        """Where operations go that are to be waited for together; None outside a manager."""
        return self._coalesced

    @coalesced.setter
    def coalesced(self, works: list[Work] | None) -> None:
        self._coalesced = works
        self._plain = self._engine if works is None else None

    def _plain_error(self, outcome: object) -> DureError:
        """Make the exception for a plain call that failed."""
        self.seq += 1
        error = cast(PlainBackend, self._only).error(outcome)
        flight.on_error(error, self.global_ranks[self._rank])
        return error

    def _kind(self, data: torch.Tensor | None) -> str:
        """Return the device whose backend runs an operation on `data`."""
        return min(self._backends) if data is None else data.device.type

    def _ended(
        self,
        event: trace.Event | None,
        noted: flight.Noted | None,
        error: BaseException | None,
    ) -> None:
        """Tell whoever listens, and the flight recorder, that an operation is over."""
        if noted is not None:
            flight.FlightRing.end(noted, error)
        if event is not None:
            trace.end(event, error)
        if isinstance(error, DureError):
            flight.on_error(error, self.global_ranks[self._rank])

    def _begin(
        self, op: str, data: torch.Tensor | None, peer: int | None, async_op: bool
    ) -> trace.Event:
        return trace.begin(
            trace.Event(
                group=self.group_name,
                op=op,
                seq=self.seq,
                rank=self._rank,
                global_rank=self.global_ranks[self._rank],
                world_size=self._size,
                nbytes=0 if data is None else data.nbytes,
                dtype="" if data is None else str(data.dtype).removeprefix("torch."),
                peer=peer,
                async_op=async_op,
            )
        )

    def _wrong_size(self, op: str, seen: str) -> ShapeError:
        return ShapeError(
            "input and output do not fit together",
            op=op,
            group=self.group_name,
            rank=self._rank,
            world_size=self._size,
            seen=seen,
        )

    def close(self, abort: bool = False) -> None:
        """Leave the group: pending work ends with `Aborted`; later calls raise `UsageError`."""
        if self.closed:
            return
        self.closed = True
        self._engine = self._plain = None
        if self._ring is not None:
            flight.retire(self._ring)
        first: DureError | None = None
        for backend in {id(b): b for b in self._backends.values()}.values():
            try:
                backend.close(abort)
            except DureError as e:
                first = first or e
        if first is not None and not abort:
            raise first
