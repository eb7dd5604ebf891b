"""Calls in `dure trace`: who waits for whom, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest

from dure.errors import PeerLost
from dure.rpc import api
from dure.trace import dump
from dure.trace.calls import calls
from dure.trace.findings import study
from dure.trace.merging import read
from tests.rpc.gates import Cluster, Gate, fail, wait_at_gate


def plus(a: int, b: int) -> int:
    return a + b


def held() -> None:
    wait_at_gate()


def relayed(to: str) -> object:
    return api.rpc_sync(to, wait_at_gate, ("done",))


def test_who_waits_for_whom_and_how_often_they_called(tmp_path: Path) -> None:
    with Cluster(3) as cluster, cluster.on(0):
        assert api.rpc_sync("worker1", plus, (1, 2)) == 3
        assert api.rpc_sync("worker1", plus, (3, 4)) == 7
        with pytest.raises(ValueError):
            api.rpc_sync("worker2", fail, ("bad",))
        waiting = api.rpc_async("worker1", relayed, ("worker2",))
        Gate.wait_for()
        dump(tmp_path)
        Gate.open.set()
        assert waiting.wait() == "done"
    flight = read(tmp_path)
    texts = [str(wait) for wait in study(flight).waits]
    assert [t for t in texts if "rank 0 waits for rank 1 in rpc #4 (relayed, peer 1)" in t]
    assert [t for t in texts if "rank 1 waits for rank 2 in rpc #1 (wait_at_gate, peer 2)" in t]
    found = {(each.caller, each.callee, each.function): each for each in calls(flight)}
    assert found.keys() >= {(0, 2, "fail"), (1, 2, "wait_at_gate")}
    assert (found[0, 1, "plus"].num_calls, found[0, 1, "plus"].num_running) == (2, 0)
    assert (found[0, 1, "relayed"].num_calls, found[0, 1, "relayed"].num_running) == (1, 1)
    assert 0 < found[0, 1, "plus"].mean_ms <= found[0, 1, "plus"].max_ms


def test_a_lost_callee_is_how_a_call_ended(tmp_path: Path) -> None:
    with Cluster(2) as cluster, cluster.on(0):
        waiting = api.rpc_async("worker1", held)
        Gate.wait_for()
        cluster.network.kill(1)
        with pytest.raises(PeerLost):
            waiting.wait()
        dump(tmp_path)
        Gate.open.set()
    (lost,) = [r for r in read(tmp_path).ranks[0].records if r.reduction == "held"]
    assert (lost.op, lost.peer, lost.error) == ("rpc", 1, "PeerLost")
