"""Abort records: what ranks make of them, which of two counts, and what a host's ranks agree on."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch

from dure.comm.backends.abort import AbortRecord, GroupState
from dure.comm.backends.hybrid.state import HybridState
from dure.comm.backends.hybrid.subcomms import group_by_host
from dure.errors import Aborted, CommError, CommTimeout, Desync, InternalError, PeerLost
from dure.native.status import Status

ERRORS = [
    CommTimeout("late", missing=(1, 2), whereabouts={1: "a.py:3"}, seen="s", fix="f"),
    PeerLost("gone", peer=1, pid=7, host="h", exit="signal 9"),
    Desync("other calls", calls={0: "a", 1: "b"}),
    Aborted("left"),
    CommError("broken", seen="why"),
    InternalError("ours"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_peers_make_the_same_error_of_what_travels(error):
    there = AbortRecord.read(AbortRecord.of(error, after=3).text())
    assert there.after == 3
    made = there.error(group="g", op="all_reduce", rank=0, world_size=3)
    assert type(made) is type(error)
    own = ("what", "peer", "seen", "fix", "missing", "whereabouts", "calls", "pid", "host", "exit")
    for name in own:
        assert getattr(made, name, None) == getattr(error, name, None), name
    assert (made.op, made.rank, made.group) == ("all_reduce", 0, "g")


def test_a_long_record_keeps_what_counts():
    long = AbortRecord(kind="Desync", what="w", peer=2, calls={0: "x" * 20_000}, after=4)
    read = AbortRecord.read(long.text())
    assert (read.kind, read.what, read.peer, read.after) == ("Desync", "w", 2, 4)
    assert AbortRecord.read("not json").error().what == "the group is broken"


def test_the_record_that_leaves_fewer_collectives_whole_counts_and_of_equals_the_first():
    state = GroupState("g", 0, 3)
    late, early = (AbortRecord(kind="CommError", what=w, after=a) for w, a in (("x", 5), ("y", 3)))
    assert state.adopt(late)
    assert not state.ends(4)
    assert state.ends(5)
    assert state.adopt(early)
    assert not state.adopt(msgspec.structs.replace(early, what="z"))
    assert state.ends(3)
    assert state.error("barrier").what == "y"


class _Segment:
    """What the ranks of a host share: the first record that is offered."""

    def __init__(self) -> None:
        self.text = ""

    def abort(self, text: str) -> None:
        self.text = self.text or text

    def failure(self):
        return SimpleNamespace(status=Status.OUTSIDE, detail=self.text) if self.text else None


def _state(segment: _Segment, rank: int) -> HybridState:
    hosts = group_by_host([("a", "a"), ("a", "a"), ("b", "b"), ("b", "b")], rank)
    local = SimpleNamespace(group=segment, allocate=lambda n, _: torch.zeros(n, dtype=torch.uint8))
    return HybridState(local, hosts, "g", 10.0)  # pyright: ignore


def test_after_two_deaths_a_leader_adopts_what_its_host_holds_as_its_ranks_do():
    segment = _Segment()
    leader, other = _state(segment, 0), _state(segment, 1)
    first, second = (
        AbortRecord(kind="PeerLost", what=f"rank {r} is lost", peer=r, host="b") for r in (2, 3)
    )
    other.settle(first)
    leader.settle(second)
    assert leader.record == other.record == first


def test_a_step_that_fails_is_one_error_on_all_ranks_of_a_host():
    segment = _Segment()
    one, other = _state(segment, 0), _state(segment, 1)
    one.fail("MemoryError: no scratch")
    for state in (one, other):
        with pytest.raises(CommError) as info:
            state.check("all_reduce")
        assert info.value.what == "an operation failed on rank 0"
        assert info.value.seen == "MemoryError: no scratch"
