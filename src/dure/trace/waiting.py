"""The operations in which ranks were waiting when they wrote their files, and for which ranks.

The files of a running job are written at different times. So a rank counts as missing from a
collective only if its file is newer than the waiting call, and does not have that collective.
"""

from __future__ import annotations

from dataclasses import dataclass

from dure.trace.events import State
from dure.trace.merging import Flight, RankFile
from dure.trace.record import Record

__all__ = ["BlockedRank", "waiting"]

_SOON_S = 0.5
"""Asynchronous operations that run for less time do not count as waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedRank:
    """A rank that waits in an operation.

    Attributes:
        rank: Its global rank.
        call: The operation.
        on: The ranks that have not called it; empty if all have.
        since_s: How long the rank had been waiting, in seconds.
    """

    rank: int
    call: Record
    on: tuple[int, ...]
    since_s: float


def waiting(flight: Flight) -> list[BlockedRank]:
    """Return every rank that waits in an operation, the longest wait first."""
    last: dict[tuple[int, str], int] = {}
    for rank, file in flight.ranks.items():
        for record in file.records:
            if not record.is_message:
                key = rank, record.group
                last[key] = max(last.get(key, 0), record.seq)
    found = [_waiting(flight, file, last) for file in flight.ranks.values()]
    return sorted((each for each in found if each is not None), key=lambda w: -w.since_s)


def _waiting(
    flight: Flight, file: RankFile, last: dict[tuple[int, str], int]
) -> BlockedRank | None:
    now = file.clock.monotonic_ns
    soon = now - int(_SOON_S * 1e9)
    running = [r for r in file.records if r.state is State.STARTED]
    calls = [r for r in running if not r.async_op or r.start_ns < soon]
    if not calls:
        return None
    call = calls[-1] if not calls[-1].async_op else calls[0]
    members = next((g.ranks for g in file.groups if g.name == call.group), ())
    if call.is_message:
        peer = -1 if call.peer is None else call.peer
        on = members[peer : peer + 1] if peer >= 0 else ()
    else:
        on = tuple(
            m for m in members if m != file.rank and _is_missing(flight, file, call, m, last)
        )
    since_s = max(0, now - call.start_ns) / 1e9
    return BlockedRank(rank=file.rank, call=call, on=on, since_s=since_s)


def _is_missing(
    flight: Flight, file: RankFile, call: Record, rank: int, last: dict[tuple[int, str], int]
) -> bool:
    other = flight.ranks.get(rank)
    if other is None:
        return True
    called = flight.time_ns(file.rank, call.start_ns)
    is_younger = flight.time_ns(rank, other.clock.monotonic_ns) > called
    return is_younger and last.get((rank, call.group), 0) < call.seq
