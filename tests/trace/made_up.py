"""Flight records of jobs that never ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dure.trace import files, flight
from dure.trace.events import State
from dure.trace.record import Origin, Record
from dure.trace.ring import FlightRing

WORLD = (0, 1, 2)


def record(rank: int, seq: int, op: str = "all_reduce", **fields: Any) -> Record:
    """An operation that rank `rank` of `WORLD` calls at `seq` ms, and that takes half of one."""
    start = seq * 1_000_000
    known: dict[str, Any] = {
        "group": "world",
        "rank": rank,
        "global_rank": rank,
        "world_size": 3,
        "dtype": "float32",
        "nbytes": 400,
        "reduction": "SUM" if op == "all_reduce" else "",
        "file": "/home/me/train.py",
        "line": 31,
        "function": "step",
        "start_ns": start,
        "end_ns": start + 500_000,
        "state": State.SUCCEEDED,
    }
    return Record(op=op, seq=seq, **known | fields)


def write(
    folder: Path, rank: int, records: list[Record], changes: dict[str, Any] | None = None
) -> Path:
    """Write the file of a rank, 10 s after its clock began; `changes` go over what is in it."""
    path = files.write(
        files.Target(folder=folder),
        rank=rank,
        groups=[Origin(group="world", rank=rank, global_ranks=WORLD, backend="shm")],
        records=records,
        job="job",
        reason="made up",
    )
    content = json.loads(path.read_text())
    content["clock"] = {"monotonic_ns": 10_000_000_000, "time_ns": 1_000_010_000_000_000}
    content["threads"] = [
        {
            "name": "MainThread",
            "main": True,
            "stack": [
                {"file": "/home/me/train.py", "line": 88, "function": "load"},
                {"file": "/usr/lib/python3.11/socket.py", "line": 5, "function": "recv"},
            ],
        }
    ]
    path.write_text(json.dumps(content | (changes or {})))
    return path


def ring_of(rank: int = 3, group: str = "g", num_ops: int = 0) -> FlightRing:
    """Return the ring of a rank that has met `num_ops` barriers; the recorder knows it."""
    ring = FlightRing(Origin(group=group, rank=0, global_ranks=(rank, rank + 1)))
    flight.add_source(ring)
    for _ in range(num_ops):
        ring.end(ring.begin("barrier", None))
    return ring
