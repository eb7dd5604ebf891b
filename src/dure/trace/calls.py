"""Remote calls in flight records, counted and timed by caller, callee and function."""

from __future__ import annotations

from dataclasses import dataclass

from dure.trace.events import State
from dure.trace.merging import Flight

__all__ = ["Calls", "calls"]

GROUP = "rpc"
"""Group name of the records of remote calls; its ranks are the workers' ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of one function that one worker made to another.

    Attributes:
        caller: Id of the calling worker.
        callee: Id of the called worker.
        function: Name of the function; "to_here" fetches a value.
        num_calls: Number of calls, including running ones.
        num_running: Number of calls without an answer yet.
        mean_ms: Mean time from call to answer of the answered calls; 0 if there are none.
        max_ms: The longest such time.
    """

    caller: int
    callee: int
    function: str
    num_calls: int
    num_running: int
    mean_ms: float
    max_ms: float


def calls(flight: Flight) -> list[Calls]:
    """Return the calls in the records, sorted by total time, the longest first."""
    took: dict[tuple[int, int, str], list[float | None]] = {}
    for file in flight.ranks.values():
        for record in file.records:
            if record.group == GROUP and record.peer is not None:
                key = record.rank, record.peer, record.reduction
                ended = record.state is not State.STARTED
                ms = (record.end_ns - record.start_ns) / 1e6 if ended else None
                took.setdefault(key, []).append(ms)
    found = [_calls(key, each) for key, each in took.items()]
    return sorted(found, key=lambda each: -each.mean_ms * each.num_calls)


def _calls(key: tuple[int, int, str], took: list[float | None]) -> Calls:
    ended = [ms for ms in took if ms is not None]
    caller, callee, function = key
    return Calls(
        caller=caller,
        callee=callee,
        function=function,
        num_calls=len(took),
        num_running=len(took) - len(ended),
        mean_ms=sum(ended) / len(ended) if ended else 0.0,
        max_ms=max(ended, default=0.0),
    )
