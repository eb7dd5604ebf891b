"""`Record`: one operation of one rank, in the flight recorder, in its files, and for hooks.

Operations are always recorded, in a compact form; `Record` objects are only made when they are
read, and for hooks (`events`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

__all__ = ["MESSAGES", "Origin", "Record", "RecordSource", "State", "describe"]

MESSAGES = frozenset({"send", "isend", "recv", "irecv", "rpc", "remote", "to_here"})
"""Operations between two ranks; their numbers are separate from those of collectives."""


class State(Enum):
    """The state of an operation.

    Obtained from:
        `Record.state`.
    """

    STARTED = "started"
    """It was called and has not ended."""
    SUCCEEDED = "succeeded"
    """It ended, and its results are in place."""
    FAILED = "failed"
    """It ended with an error, whose type is in `Record.error`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One operation of one rank.

    Attributes:
        group: Name of the process group.
        op: The operation, such as "all_reduce".
        seq: The collective's number in its group, from 1, the same on all ranks; -1 if it has none.
            Messages (send, receive and remote calls) are numbered separately on each rank.
        rank: The calling rank within `group`.
        global_rank: The calling rank's number in the job.
        world_size: Number of ranks of `group`.
        dtype: Name of the element type, such as "float32"; empty if no tensor is moved.
        nbytes: Bytes of this rank's input, or of its output if it has no input.
        peer: The root of a rooted collective, or the peer of a message (a rank of `group`).
        tag: The tag of a message.
        reduction: Name of the reduction, such as "SUM", or of a remote call's function; else empty.
        async_op: Whether the call returns before the operation ends.
        file: The program's file with the call; empty if unknown.
        line: The line of the call.
        function: The function that contains the call.
        start_ns: Time of the call, on `time.monotonic_ns`.
        end_ns: Time of the end on the same clock (for an asynchronous operation, when the end was
            noticed); 0 before it.
        state: The state of the operation.
        error: Type name of the error of a failed operation.

    Obtained from:
        `records`; hooks of `add_hook` receive them as events.
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
    def duration_ns(self) -> int:
        """Nanoseconds from call to end; 0 while the operation has not ended."""
        return max(0, self.end_ns - self.start_ns) if self.end_ns else 0

    @property
    def is_message(self) -> bool:
        """Whether the operation is between two ranks, so that its number is local."""
        return self.op in MESSAGES

    @property
    def site(self) -> str:
        """The call site as `file:line`; empty if unknown."""
        return f"{self.file}:{self.line}" if self.file else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The rank and group whose operations a source records.

    Attributes:
        group: Name of the process group.
        rank: The rank within it.
        global_ranks: Global rank of each rank of the group.
        backend: The group's backend, such as "shm".
    """

    group: str
    rank: int
    global_ranks: tuple[int, ...]
    backend: str = ""

    @property
    def global_rank(self) -> int:
        """The rank's number in the job."""
        return self.global_ranks[self.rank]


class RecordSource(Protocol):
    """Records the last operations of one rank in one group.

    Threads:
        `records` may be called from any thread, and from a signal handler, at any time.
    """

    origin: Origin
    """The rank and group of the operations."""

    def records(self, last: int | None = None) -> list[Record]:
        """Return all records, the oldest first, or only the `last` ones, which costs less."""
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
