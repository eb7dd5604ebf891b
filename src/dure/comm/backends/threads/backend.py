"""The threads backend: ranks are threads of one process.

It makes odd world sizes, tests with 128 ranks and teaching cheap, and it is the plainest statement
of what a collective does: see "Where thread-ranks meet" in `threads.room` and `threads.moves`. It
is not meant to be fast with large tensors; one thread moves the data of all ranks.

Ranks find each other through the group's store: rank 0 makes a `Room`, keeps it in a table of this
process under a random name, and says the name. The table holds the room weakly: when the last rank
drops its backend the room is gone.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakValueDictionary

import torch

from dure.comm.backends.base import BackendOptions, Ticket
from dure.comm.backends.threads.moves import Call
from dure.comm.backends.threads.room import Meeting, Message, Receive, Room, wait_for
from dure.comm.ops import ReduceOp
from dure.errors import RendezvousTimeout, UsageError
from dure.trace.ring import call_site

__all__ = ["ThreadBackend", "create_threads"]

_rooms: WeakValueDictionary[str, Room] = WeakValueDictionary()
_rooms_lock = threading.Lock()
_KEY = "threads/room"


def create_threads(options: BackendOptions) -> ThreadBackend:
    """Meet the other ranks of the group, which must be threads of this process.

    Raises:
        UsageError: The ranks are not all in one process.
        RendezvousTimeout: A rank did not come; `missing` says which.
    """
    room = _open_room(options) if options.rank == 0 else _find_room(options)
    room.join(options.rank)
    if not room.everyone_here.wait(options.timeout.total_seconds()):
        missing = room.not_joined()
        raise RendezvousTimeout(
            "not all thread-ranks came",
            group=options.name,
            rank=options.rank,
            world_size=options.size,
            came=tuple(r for r in range(options.size) if r not in missing),
            missing=missing,
        )
    return ThreadBackend(options, room)


def _open_room(options: BackendOptions) -> Room:
    room = Room(options.name, options.size)
    token = secrets.token_hex(8)
    with _rooms_lock:
        _rooms[token] = room
    options.store.set(_KEY, f"{os.getpid()}/{token}")
    return room


def _find_room(options: BackendOptions) -> Room:
    options.store.wait([_KEY], options.timeout)
    pid, _, token = options.store.get(_KEY).decode().partition("/")
    with _rooms_lock:
        room = _rooms.get(token)
    if room is None:
        raise UsageError(
            "the threads backend needs all ranks in one process",
            group=options.name,
            rank=options.rank,
            seen=f"rank 0 is in process {pid}, this rank in {os.getpid()}",
            fix="Use the shm or gloo backend for ranks that are processes.",
        )
    return room


class ThreadBackend:
    """One thread-rank's part of a group; the contract is that of `Backend`."""

    name = "threads"
    device_types = frozenset({"cpu"})

    def __init__(self, options: BackendOptions, room: Room) -> None:
        self._room, self._rank, self._size = room, options.rank, options.size
        self.set_timeout(options.timeout)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks of each host: all are in this process."""
        return (tuple(range(self._size)),)

    def gone(self, rank: int) -> bool:
        """Tell whether `rank` has left, or ended."""
        return self._room.has_left(rank)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._timeout_s = timeout.total_seconds()

    def _meet(
        self,
        op: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        async_op: bool,
        *,
        root: int = -1,
        reduce: ReduceOp | None = None,
    ) -> Ticket | None:
        """Take part in the next collective."""
        call = Call(
            op=op, inputs=inputs, outputs=outputs, root=root, reduce=reduce, site=call_site()
        )
        meeting = self._room.arrive(self._rank, call)
        ticket = _MeetingTicket(self._room, self._rank, op, meeting, self._timeout_s)
        if async_op:
            return ticket
        ticket.wait()
        return None

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Ticket | None:
        """See `Backend.all_reduce`."""
        both = (tensor,)
        return self._meet("all_reduce", both, both, async_op, reduce=op)

    def reduce(self, tensor: torch.Tensor, dst: int, op: ReduceOp, async_op: bool) -> Ticket | None:
        """See `Backend.reduce`."""
        both = (tensor,)
        return self._meet("reduce", both, both, async_op, root=dst, reduce=op)

    def broadcast(self, tensor: torch.Tensor, src: int, async_op: bool) -> Ticket | None:
        """See `Backend.broadcast`."""
        both = (tensor,)
        return self._meet("broadcast", both, both, async_op, root=src)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_gather`."""
        return self._meet("all_gather", (tensor,), outputs, async_op)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_gather_single`."""
        return self._meet("all_gather_single", (tensor,), (output,), async_op)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        tensor: torch.Tensor,
        dst: int,
        async_op: bool,
    ) -> Ticket | None:
        """See `Backend.gather`."""
        return self._meet("gather", (tensor,), outputs or (), async_op, root=dst)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        src: int,
        async_op: bool,
    ) -> Ticket | None:
        """See `Backend.scatter`."""
        return self._meet("scatter", inputs or (), (tensor,), async_op, root=src)

    def reduce_scatter(
        self, tensor: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """See `Backend.reduce_scatter`."""
        return self._meet("reduce_scatter", inputs, (tensor,), async_op, reduce=op)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp, async_op: bool
    ) -> Ticket | None:
        """See `Backend.reduce_scatter_single`."""
        return self._meet("reduce_scatter_single", (tensor,), (output,), async_op, reduce=op)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all`."""
        return self._meet("all_to_all", inputs, outputs, async_op)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, async_op: bool
    ) -> Ticket | None:
        """See `Backend.all_to_all_single`."""
        return self._meet("all_to_all_single", (tensor,), (output,), async_op)

    def barrier(self, async_op: bool) -> Ticket | None:
        """See `Backend.barrier`."""
        return self._meet("barrier", (), (), async_op)

    def send(self, tensor: torch.Tensor, dst: int, tag: int, async_op: bool) -> Ticket | None:
        """See `Backend.send`; it is complete when it returns."""
        self._room.send(dst, Message(self._rank, tag, tensor, call_site()))
        return _DONE if async_op else None

    def recv(self, tensor: torch.Tensor, src: int | None, tag: int, async_op: bool) -> Ticket:
        """See `Backend.recv`."""
        receive = Receive(tensor, src, tag, call_site())
        self._room.post(self._rank, receive)
        ticket = _ReceiveTicket(self._room, self._rank, receive, self._timeout_s)
        if not async_op:
            ticket.wait()
        return ticket

    def shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.shared_empty`: all memory of a process is shared by its threads."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def host_shared_empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Backend.host_shared_empty`: all take the memory of rank 0."""
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        both = (memory,)
        self._meet("host_shared_empty", both, both, False)
        return memory

    def close(self, abort: bool) -> None:
        """See `Backend.close`."""
        self._room.leave(self._rank, abort)


class _Done:
    """The ticket of what was complete at once."""

    source = -1

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        del timeout_s
        return True


_DONE = _Done()


class _MeetingTicket:
    """A pending collective of one rank. Threads: any method, from any thread."""

    source = -1

    def __init__(self, room: Room, rank: int, op: str, meeting: Meeting, timeout_s: float) -> None:
        self._room, self._rank, self._op, self._meeting = room, rank, op, meeting
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s

    def done(self) -> bool:
        return self._meeting.ended.is_set() or time.monotonic() >= self._deadline

    def wait(self, timeout_s: float | None = None) -> bool:
        meeting = self._meeting
        if not meeting.ended.is_set():
            if not wait_for(
                meeting.ended, self._deadline, timeout_s, self._room.lose_ended_threads
            ):
                return False
            self._room.expire_meeting(meeting)
            meeting.ended.wait()  # it has ended, or its last rank is moving the data
        if meeting.failure is not None:
            elapsed_s = time.monotonic() - self._began
            raise meeting.failure.error(self._room, self._rank, self._op, elapsed_s)
        return True


class _ReceiveTicket:
    """A pending receive. Threads: any method, from any thread."""

    def __init__(self, room: Room, rank: int, receive: Receive, timeout_s: float) -> None:
        self._room, self._rank, self._receive = room, rank, receive
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s

    @property
    def source(self) -> int:
        return self._receive.source

    def done(self) -> bool:
        return self._receive.ended.is_set() or time.monotonic() >= self._deadline

    def wait(self, timeout_s: float | None = None) -> bool:
        receive = self._receive
        if not receive.ended.is_set():
            if not wait_for(
                receive.ended, self._deadline, timeout_s, self._room.lose_ended_threads
            ):
                return False
            self._room.expire_receive(self._rank, receive)
            receive.ended.wait()  # it has ended, or its message is being copied
        if receive.failure is not None:
            elapsed_s = time.monotonic() - self._began
            raise receive.failure.error(self._room, self._rank, "recv", elapsed_s)
        return True
