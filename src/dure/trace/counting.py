"""Counts of a rank's operations, for the metrics of its job (`dure run --metrics-port`).

A thread of the rank reads the flight recorder once a second, and adds what has ended since to its
counts. So an operation itself costs nothing more. The recorder keeps the last 2,000 operations: of
more in a second the oldest are not read. Their number is known for collectives, which are numbered.

For the time that ranks wait for each other the launcher compares when ranks of this host began the
same collective. A rank reports the beginnings of some: those whose number is a multiple of a power
of two, so that all ranks choose the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dure.trace import flight
from dure.trace.record import Record, State

__all__ = ["EVERY_S", "Counts", "OpCount", "write_counts"]

EVERY_S = 1.0
_MOST_STARTS = 128
"""Of each group, in one file."""
_STARTS_NS = 4_000_000_000
"""Beginnings of collectives that ended so long ago are still in the file."""
_SETTLED_NS = 5_000_000
"""An operation is counted when it ended so long ago: its record is complete then."""


@dataclass
class OpCount:
    """Operations of one kind that have ended."""

    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    failures: int = 0


@dataclass
class Counts:
    """What one rank has done since its counting began.

    Attributes:
        by_op: For each operation.
        unseen: Collectives that were dropped by the recorder before they were read.
        starts: For each group its ranks, and number and beginning of some of the last collectives.
    """

    by_op: dict[str, OpCount] = field(default_factory=dict[str, OpCount])
    unseen: int = 0
    starts: dict[str, tuple[int, list[tuple[int, int]]]] = field(
        default_factory=dict[str, tuple[int, list[tuple[int, int]]]]
    )
    _until_ns: int = 0
    _last: dict[str, int] = field(default_factory=dict[str, int])
    """Of each group: the number of the last collective that was counted or missed."""

    def add(self, records: Iterable[Record], now_ns: int) -> None:
        """Count operations that ended since the last call.

        Args:
            records: The last operations of the rank, in any order; those that were counted, too.
            now_ns: The time, on `time.monotonic_ns`.
        """
        until_ns = now_ns - _SETTLED_NS
        ended = [r for r in records if r.end_ns and r.end_ns <= until_ns]
        new = [r for r in ended if r.end_ns > self._until_ns]
        for record in new:
            found = self.by_op.setdefault(record.op, OpCount())
            found.count += 1
            found.num_bytes += record.nbytes
            found.seconds += record.duration_ns / 1e9
            found.failures += record.state is State.FAILED
        self._count_unseen([r for r in new if not r.is_message and r.seq > 0])
        self._until_ns = until_ns
        recent = [r for r in ended if r.end_ns > until_ns - _STARTS_NS]
        self.starts = _starts([r for r in recent if not r.is_message and r.seq > 0])

    def _count_unseen(self, new: list[Record]) -> None:
        numbers: dict[str, list[int]] = {}
        for record in new:
            numbers.setdefault(record.group, []).append(record.seq)
        for group, found in numbers.items():
            before = self._last.get(group, 0)
            last = max(found)
            if last > before:
                later = sum(number > before for number in found)
                self.unseen += last - before - later
                self._last[group] = last


def _starts(collectives: list[Record]) -> dict[str, tuple[int, list[tuple[int, int]]]]:
    groups: dict[str, list[Record]] = {}
    for record in collectives:
        groups.setdefault(record.group, []).append(record)
    found: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    for group, records in groups.items():
        every = 1
        while len(records) // every > _MOST_STARTS:
            every *= 2
        chosen = [(r.seq, r.start_ns) for r in records if r.seq % every == 0]
        found[group] = records[0].world_size, chosen
    return found


def write_counts(folder: Path, counts: dict[int, Counts]) -> None:
    """Count what the ranks of this process have done, and replace the file of each.

    Args:
        folder: The folder of the files.
        counts: By global rank; those of ranks that are new are added.

    Raises:
        OSError: A file cannot be written.
    """
    records = flight.recorded()
    for rank in {record.global_rank for record in records}:
        counts.setdefault(rank, Counts())
    for rank, mine in counts.items():
        mine.add([r for r in records if r.global_rank == rank], time.monotonic_ns())
        content: dict[str, Any] = {
            "pid": os.getpid(),
            "operations": {
                op: [c.count, c.num_bytes, c.seconds, c.failures] for op, c in mine.by_op.items()
            },
            "unseen": mine.unseen,
            "starts": mine.starts,
        }
        hidden = folder / f".rank{rank}-{os.getpid()}"
        hidden.write_text(json.dumps(content))
        hidden.rename(folder / f"rank{rank}.json")
