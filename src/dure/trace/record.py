"""`Record`: one operation of one rank, as the flight recorder keeps it and writes it down.

A record is what `Event` is, and more: where in the program the call stands, which reduction, which
tag. Events are shown to whoever listens, as they happen; records are kept whether anybody listens
or not, and are made of what a ring noted only when somebody asks for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dure.trace.events import State

__all__ = ["MESSAGES", "Origin", "Record", "Source", "describe"]

MESSAGES = frozenset({"send", "isend", "recv", "irecv", "rpc", "remote", "to_here"})
"""Operations between two ranks: they are numbered apart from the collectives of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One operation of one rank.

    Attributes:
        group: Name of the process group.
        op: The operation, such as "all_reduce".
        seq: The collective's number in its group, the same on all ranks, from 1. Messages
            (`MESSAGES`) have a count of their own, which means nothing to other ranks.
        rank: The rank within `group` that called.
        global_rank: The same rank's number in the whole job.
        world_size: Ranks of `group`.
        dtype: Name of the element type, such as "float32"; empty where nothing is moved.
        nbytes: Bytes of this rank's input; of its output where it has no input.
        peer: The root of a rooted collective, or the peer of a message (a rank of `group`).
        tag: The tag of a message.
        reduction: Name of the reduction, such as "SUM"; empty where nothing is reduced. Of a remote
            call, the function's name.
        async_op: The caller went on before the operation ended.
        file: The program's file that called; empty where that is not known.
        line: The line in it.
        function: The function in it.
        start_ns: When it was called, on `time.monotonic_ns`.
        end_ns: When it ended on the same clock (of an asynchronous one: when that was noticed);
            0 while it has not.
        state: How far it has come.
        error: Name of the error's type, of an operation that failed.
    """

    group: str
    op: str
    seq: int = -1
    rank: int = 0
    global_rank: int = 0
    world_size: int = 1
    dtype: str = ""
    nbytes: int = 0
    peer: int | None = None
    tag: int | None = None
    reduction: str = ""
    async_op: bool = False
    file: str = ""
    line: int = 0
    function: str = ""
    start_ns: int = 0
    end_ns: int = 0
    state: State = State.STARTED
    error: str = ""

    @property
    def is_message(self) -> bool:
        """Whether it is between two ranks, and so has no number that others share."""
        return self.op in MESSAGES

    @property
    def site(self) -> str:
        """Where the call stands, as `file:line`; empty where that is not known."""
        return f"{self.file}:{self.line}" if self.file else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose operations a source records: one rank's part of one group.

    Attributes:
        group: Name of the process group.
        rank: The rank within it.
        global_ranks: Global rank of each rank of the group.
        backend: What serves the group, such as "shm".
    """

    group: str
    rank: int
    global_ranks: tuple[int, ...]
    backend: str = ""

    @property
    def global_rank(self) -> int:
        """The rank's number in the whole job."""
        return self.global_ranks[self.rank]


class Source(Protocol):
    """Whatever keeps the last operations of one rank in one group.

    Threads: `records` may be called from any thread, and from a signal handler, at any time.
    """

    origin: Origin
    """Whose operations they are."""

    def records(self, last: int | None = None) -> list[Record]:
        """Return what is kept, the oldest first; or only the `last` ones, which costs less."""
        ...


def describe(record: Record) -> str:
    """Return a call as text, such as "all_reduce #41 (float32, 4000 bytes, SUM)"."""
    parts = [record.dtype] if record.dtype else []
    if record.nbytes or record.dtype:
        parts.append(f"{record.nbytes} bytes")
    if record.reduction:
        parts.append(record.reduction)
    if record.peer is not None and record.peer >= 0:
        parts.append(f"{'peer' if record.is_message else 'root'} {record.peer}")
    return f"{record.op} #{record.seq}" + (f" ({', '.join(parts)})" if parts else "")
