"""`FlightRing`: what it notes of an operation, and where it finds the caller."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import dure
from dure.trace.events import State
from dure.trace.record import Origin
from dure.trace.ring import FlightRing, call_site


@dataclass
class Data:
    """What a ring wants to know of a tensor."""

    dtype: str = "torch.float32"
    nbytes: int = 64


@pytest.fixture
def ring():
    return FlightRing(Origin(group="g", rank=1, global_ranks=(4, 7, 9)), capacity=4)


def test_an_operation_is_noted_with_its_place_and_its_times(ring):
    noted = ring.begin("all_reduce", Data(), None, "SUM", False)
    (running,) = ring.records()
    ring.end(noted)
    (ended,) = ring.records()
    assert (running.state, running.end_ns) == (State.STARTED, 0)
    assert ended.state is State.SUCCEEDED and ended.end_ns >= ended.start_ns > 0
    assert (ended.group, ended.rank, ended.global_rank, ended.world_size) == ("g", 1, 7, 3)
    assert (ended.op, ended.dtype, ended.nbytes, ended.reduction) == (
        "all_reduce",
        "float32",
        64,
        "SUM",
    )
    assert ended.file == __file__
    assert ended.function.endswith("test_an_operation_is_noted_with_its_place_and_its_times")
    lines = Path(__file__).read_text().splitlines()
    assert "ring.begin(" in lines[ended.line - 1]


def test_messages_and_collectives_are_numbered_apart(ring):
    for op in ("send", "all_reduce", "irecv", "barrier"):
        ring.end(ring.begin(op, Data(), 2, 5))
    found = [(r.op, r.seq, r.is_message) for r in ring.records()]
    assert found == [
        ("send", 1, True),
        ("all_reduce", 1, False),
        ("irecv", 2, True),
        ("barrier", 2, False),
    ]
    assert {r.tag for r in ring.records()} == {5} and {r.peer for r in ring.records()} == {2}


def test_frames_of_dure_and_torch_are_passed_over():
    called = {}

    def inside(folder: str, call):
        names = {"call": call}
        exec(compile("def f():\n    return call()", f"{folder}/fake.py", "exec"), names)
        return names["f"]

    dure_folder, torch_folder = (str(Path(m.__file__ or "").parent) for m in (dure, torch))
    layered = inside(dure_folder, inside(torch_folder, call_site))
    called["site"] = layered()
    assert called["site"].startswith(f"{__file__}:")
    programs = f"{dure_folder}/testing"
    assert inside(programs, call_site)() == f"{programs}/fake.py:2"
