"""What an agent does with calls: values, errors, deaths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dure.errors import PeerLost, RpcError, UsageError
from dure.rpc import api
from dure.rpc.allow import Allowed
from dure.rpc.message import RpcMessage
from dure.rpc.names import WorkerInfo
from tests.rpc.gates import Cluster, Gate, add, fail, held, relay, wait_at_gate, who
from tests.waiting import until


def test_values_come_back_from_who_was_called() -> None:
    with Cluster(3) as cluster, cluster.on(0):
        assert api.rpc_sync("worker1", who, (5,)) == ("worker1", 5)
        assert api.rpc_sync(2, who, kwargs={"value": 6}) == ("worker2", 6)
        assert api.rpc_sync(WorkerInfo("worker0", 0), who) == ("worker0", 0)
        assert torch.equal(
            api.rpc_sync("worker1", torch.add, (torch.ones(3), 1)), torch.full((3,), 2.0)
        )
        assert api.rpc_async("worker1", add, ([1], [2])).wait() == [1, 2]
        with pytest.raises(ValueError, match="no good") as caught:
            api.rpc_sync("worker1", fail, ("no good",))
        assert "WorkerInfo(id=1, name=worker1)" in str(caught.value)


def test_what_cannot_be_sent_is_refused_at_the_caller() -> None:
    with Cluster(2) as cluster, cluster.on(0) as agent:
        wrong: list[tuple[type[Exception], tuple[Any, ...]]] = [
            (RpcError, ("worker1", lambda: 1)),
            (UsageError, ("worker1", 3)),
            (UsageError, (1.5, add)),
            (UsageError, (True, add)),
            (UsageError, (False, add)),
            (UsageError, ("worker1", add, 1)),
            (UsageError, ("worker1", add, torch.ones(2))),
            (UsageError, ("worker1", add, (1,), 2)),
            (UsageError, ("worker1", add, (1, 2), None, "1")),
            (UsageError, ("worker1", add, (1, 2), None, None)),
            (RpcError, ("worker7", add)),
            (RpcError, (-1, add)),
            (RpcError, (WorkerInfo("worker7", 7), add)),
        ]
        for call in (api.rpc_sync, api.rpc_async, api.remote):
            for kind, arguments in wrong:
                with pytest.raises(kind):
                    call(*arguments)
        with pytest.raises(RpcError, match="cannot be sent"):  # the answer
            api.rpc_sync("worker1", lambda_maker)
        until(lambda: agent.activity()[1] == 0, "calls to end")


def lambda_maker() -> Any:
    return lambda: 1


def test_calls_nest_and_a_waiting_one_needs_no_slot() -> None:
    with Cluster(2, slots=1) as cluster, cluster.on(0):
        got = api.rpc_sync("worker1", relay, (["worker0", "worker1"] * 4, 0))
        assert got == [(f"worker{1 - n % 2}", n) for n in range(9)]
        assert api.rpc_sync("worker0", relay, (["worker0"], 0)) == [("worker0", 0), ("worker0", 1)]


def test_a_death_ends_the_calls_that_wait_for_it() -> None:
    with Cluster(3) as cluster, cluster.on(0):
        waiting = [api.rpc_async("worker1", wait_at_gate) for _ in range(3)]
        nested = api.rpc_async("worker2", relay, (["worker1"], 0))
        nested.wait()
        Gate.wait_for(3)
        cluster.network.kill(1)
        for future in waiting:
            with pytest.raises(PeerLost) as caught:
                future.wait()
            assert caught.value.peer == 1
            assert caught.value.exit == "signal 9 (SIGKILL)"
            assert "worker1" in str(caught.value)
        for call in (api.rpc_sync, api.remote):
            with pytest.raises(PeerLost):
                call("worker1", who)
        with pytest.raises(PeerLost):
            api.rpc_async(WorkerInfo("worker1", 1), who).wait()
        assert api.rpc_sync("worker2", who) == ("worker2", 0)


def test_a_list_of_what_may_be_called() -> None:
    with Cluster(2, allow=Allowed([add])) as cluster, cluster.on(0):
        assert api.rpc_sync("worker1", add, (1, torch.ones(1))).item() == 2
        for function in (who, torch.add, complex):
            with pytest.raises(RpcError, match="does not let others call"):
                api.rpc_sync("worker1", function, (1,))


def test_results_go_back_by_the_callers_device_map() -> None:
    one, two, three = (torch.device("cuda", n) for n in (1, 2, 3))
    with Cluster(2) as cluster:
        here, there = cluster.agents
        here.device_maps = {"worker1": {one: two}}
        there.device_maps = {"worker0": {three: one}}
        calls = list[RpcMessage]()
        receive = there.receive
        there.receive = lambda message, memories: (
            calls.append(message),
            receive(message, memories),
        )[1]
        assert here.rpc_sync("worker1", add, (1, 2)) == 3
        assert calls[0].devices == {"cuda:2": "cuda:1"}
        assert here.payloads._device_there(there.me, one) == "cuda:2"
        assert there.payloads._device_back(calls[0], two) == "cuda:1"
        assert there.payloads._device_back(calls[0], three) == "cuda:1"  # by its own map
        for device in (one, torch.device("cuda", 7)):
            with pytest.raises(ValueError, match="no device map"):
                there.payloads._device_back(calls[0], device)


def test_what_cannot_be_sent_leaves_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    text: Any = "1"
    with Cluster(2) as cluster, cluster.on(0) as agent:
        ref = api.RRef(1)
        with pytest.raises(UsageError):
            api.rpc_sync("worker1", add, (ref, 1), timeout=text)
        assert agent.debug_info()["num_pending_users"] == "0"
        rref = api.remote("worker1", add, (1, 2))
        assert rref.to_here() == 3

        def full(*_: object) -> None:
            raise OSError("no room")

        with monkeypatch.context() as patched:
            patched.setattr(agent.transport, "send", full)
            with pytest.raises(OSError, match="no room"):
                api.rpc_async("worker1", who, (rref,))
            with pytest.raises(OSError, match="no room"):
                api.remote("worker1", who, (rref,))
        assert agent.activity()[1] == 0
        del rref
        assert api.rpc_sync("worker1", add, (1, 2)) == 3
        until(lambda: not held(cluster.agents[1]) and not held(agent), "references to go")
