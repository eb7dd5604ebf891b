"""The timeline keeps the rules of the trace-event format."""

import json

import pytest

from dure.trace.events import State
from dure.trace.merging import read
from dure.trace.timeline import timeline
from tests.trace.made_up import record, write

ALWAYS = {"name": str, "ph": str, "pid": int, "tid": int}
BY_PHASE = {
    "M": {"args": dict},
    "X": {"cat": str, "ts": float, "dur": float, "args": dict},
    "b": {"cat": str, "ts": float, "id": str, "args": dict},
    "e": {"cat": str, "ts": float, "id": str},
}


@pytest.fixture
def events(tmp_path):
    """Two ranks: calls that end, an asynchronous one, one that runs; rank 1 is always late."""
    for rank in (0, 1):
        late = rank * 100_000
        write(
            tmp_path,
            rank,
            [
                record(rank, 1, start_ns=1_000_000 + late),
                record(rank, 2, async_op=True, start_ns=2_000_000 + late),
                record(rank, 3, start_ns=3_000_000 + late, end_ns=0, state=State.STARTED),
                record(rank, 1, op="send", peer=1 - rank, tag=0, start_ns=4_000_000 + late),
            ],
        )
    flight = read(tmp_path)
    made = json.loads(json.dumps(timeline(flight)))
    assert set(made) == {"traceEvents", "displayTimeUnit"} and made["displayTimeUnit"] in (
        "ms",
        "ns",
    )
    return made["traceEvents"]


def test_every_event_has_the_fields_of_its_phase(events):
    for event in events:
        for name, kind in (ALWAYS | BY_PHASE[event["ph"]]).items():
            assert isinstance(event[name], kind), (name, event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    assert {e["ph"] for e in events} == set(BY_PHASE)


def test_slices_of_a_track_do_not_overlap(events):
    for pid in (0, 1):
        slices = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == pid)
        assert len(slices) == 3
        running = slices[1]
        assert running == pytest.approx((2000 + 100 * pid, 9_997_000 - 100 * pid)), "up to the dump"
