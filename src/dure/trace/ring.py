"""`FlightRing`: the last operations of a group whose backend does not record them itself.

Recording must be cheap, so an entry is a list of values that are available without work: the dtype
object, the caller's code object and instruction offset, and two times. Names and line numbers are
computed by `records`. The engine of the shm backend has its own ring, in C++.

The *call site* is the nearest frame that is not a library's (`dure.trace.frames`), or the outermost
frame if there is none, as in the backward thread in which DDP reduces a bucket.
"""

from __future__ import annotations

import sys
from collections import deque
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any

from dure.trace.events import State
from dure.trace.frames import is_library
from dure.trace.record import MESSAGES, Origin, Record

__all__ = ["CAPACITY", "FlightRing", "Noted", "call_site"]

CAPACITY = 2000
"""How many operations are kept."""

# The positions of an entry's values.
_OP, _SEQ, _DTYPE, _NBYTES, _PEER, _DETAIL, _ASYNC, _CODE, _AT, _START, _END, _ERROR = range(12)
_RUNNING, _GOOD = object(), object()

Noted = list[Any]
"""An entry of a ring, for `FlightRing.end`; its content is private."""


class FlightRing:
    """The last `capacity` operations of one rank in one group (a `RecordSource`).

    Threads:
        Every method may be called from any thread; each is a single list operation, so no lock is
        needed.
    """

    def __init__(self, origin: Origin, capacity: int = CAPACITY) -> None:
        self.origin = origin
        self._noted: deque[Noted] = deque(maxlen=capacity)
        self._num_collectives = self._num_messages = 0

    def begin(
        self,
        op: str,
        data: Any,
        peer: int | None = None,
        detail: str | int | None = None,
        async_op: bool = False,
    ) -> Noted:
        """Record the start of an operation.

        Args:
            op: The operation.
            data: Its tensor (any object with `dtype` and `nbytes`), or None.
            peer: Its root, or the peer of a message.
            detail: Name of the reduction, or the tag of a message.
            async_op: Whether the call returns before the operation ends.

        Returns:
            The entry, for `end`.
        """
        if op in MESSAGES:
            seq = self._num_messages = self._num_messages + 1
        else:
            seq = self._num_collectives = self._num_collectives + 1
        frame = _outside(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        noted: Noted = [
            op,
            seq,
            None if data is None else data.dtype,
            0 if data is None else data.nbytes,
            peer,
            detail,
            async_op,
            frame.f_code,
            frame.f_lasti,
            monotonic_ns(),
            0,
            _RUNNING,
        ]
        self._noted.append(noted)
        return noted

    @staticmethod
    def end(noted: Noted, error: BaseException | None = None) -> None:
        """Record the end of an operation, and its error if it failed."""
        noted[_END] = monotonic_ns()
        noted[_ERROR] = _GOOD if error is None else type(error).__name__

    def records(self, last: int | None = None) -> list[Record]:
        """Return all records, the oldest first, or only the `last` ones."""
        lines: dict[tuple[int, int], int] = {}
        noted = list(self._noted)
        return [self._record(each, lines) for each in noted[-last if last else 0 :]]

    def _record(self, noted: Noted, lines: dict[tuple[int, int], int]) -> Record:
        origin, how, detail = self.origin, noted[_ERROR], noted[_DETAIL]
        code: CodeType = noted[_CODE]
        place = (id(code), noted[_AT])
        line = lines.get(place) or lines.setdefault(place, _line(code, noted[_AT]))
        return Record(
            group=origin.group,
            op=noted[_OP],
            seq=noted[_SEQ],
            rank=origin.rank,
            global_rank=origin.global_rank,
            world_size=len(origin.global_ranks),
            dtype="" if noted[_DTYPE] is None else str(noted[_DTYPE]).removeprefix("torch."),
            nbytes=noted[_NBYTES],
            peer=noted[_PEER],
            tag=detail if isinstance(detail, int) else None,
            reduction=detail if isinstance(detail, str) else "",
            async_op=noted[_ASYNC],
            file=code.co_filename,
            line=line,
            function=code.co_qualname,
            start_ns=noted[_START],
            end_ns=noted[_END],
            state=_STATES.get(id(how), State.FAILED),
            error=how if isinstance(how, str) else "",
        )


def call_site() -> str:
    """Return file and line of the nearest caller outside libraries."""
    frame = _outside(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _outside(frame: FrameType) -> FrameType:
    """Return the nearest frame of the program, or the outermost frame if there is none."""
    while is_library(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


_STATES = {id(_RUNNING): State.STARTED, id(_GOOD): State.SUCCEEDED}


def _line(code: CodeType, offset: int) -> int:
    """Return the line of an instruction, as in tracebacks."""
    for start, end, line in code.co_lines():
        if start <= offset < end and line is not None:
            return line
    return code.co_firstlineno
