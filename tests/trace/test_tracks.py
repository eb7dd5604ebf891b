"""Steps on the timeline: phases, and buckets that last as long as what they started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dure.trace.merging import read
from dure.trace.spans import BUCKETS, MODULES, WAITS, Span
from dure.trace.timeline import timeline
from tests.trace.made_up import record, write

MS = 1_000_000


def bucket(index: int, start_ms: float, end_ms: float, group: str = "world") -> Span:
    """A bucket whose start took a tenth of a millisecond."""
    start = int(start_ms * MS)
    return Span(
        name=f"bucket {index}",
        track=BUCKETS,
        start_ns=start,
        started_ns=start + MS // 10,
        end_ns=int(end_ms * MS),
        group=group,
        details={"bytes": 8, "first": "a.weight"},
    )


def drawn(folder: Path, *found: Span) -> dict[str, Any]:
    """Write a rank with three operations at 1, 2 and 3 ms; return its slices and track names."""
    calls = [record(0, n, async_op=True, start_ns=n * MS + 50_000) for n in (1, 2, 3)]
    write(folder, 0, calls, {"spans": msgspec.to_builtins(found)})
    flight = read(folder)
    events = timeline(flight)["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return {
        e["name"]: e | {"track": tracks[e["tid"]], "end": round(e["ts"] + e["dur"])}
        for e in events
        if e["ph"] == "X"
    }


def test_a_bucket_lasts_as_long_as_the_operation_it_started(tmp_path):
    found = drawn(tmp_path, bucket(0, 1.0, 9.0), bucket(1, 2.0, 9.0, group="another"))
    # The operation that began at 1.05 ms ended at 1.5 ms; the earliest of all is at 1.0 ms.
    assert (found["bucket 0"]["ts"], found["bucket 0"]["end"]) == (0.0, 500)
    assert found["bucket 1"]["end"] == 8000  # no operation of its group: as the rank noticed it
    assert found["bucket 0"]["args"] == {"bytes": 8, "first": "a.weight"}


def test_a_gather_lasts_until_all_that_it_started_has_ended(tmp_path):
    gather = Span(
        name="unshard 0",
        track=MODULES,
        start_ns=MS,
        started_ns=int(2.1 * MS),
        end_ns=9 * MS,
        group="world",
    )
    wait = Span(name="unshard 1", track=WAITS, start_ns=4 * MS, end_ns=5 * MS)
    found = drawn(tmp_path, gather, wait)
    # Operations began at 1.05 and 2.05 ms, and ended at 1.5 and 2.5.
    assert (found["unshard 0"]["end"], found["unshard 0"]["track"]) == (1500, "modules")
    assert (found["unshard 1"]["end"], found["unshard 1"]["track"]) == (4000, "waits")
    assert found["unshard 1"]["tid"] < found["unshard 0"]["tid"]
