"""Remote calls in torch's profilers."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.profiler_legacy import profile

from dure.rpc import api
from dure.rpc.functions import async_execution
from dure.rpc.profiling import follow_profiler
from tests.rpc.gates import Cluster

follow_profiler()


def double_and_add(x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("doubled"):
        x = torch.mul(x, 2)
    return torch.add(x, 1)


def double_elsewhere(x: torch.Tensor) -> torch.Tensor:
    return api.rpc_sync("worker2", torch.mul, (x, 2))


@async_execution
def later(x: torch.Tensor) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(x + 1)
    return future


def test_the_callees_operations_are_within_the_range_of_the_call() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        x = torch.ones(3)
        with profile(record_shapes=True) as seen:
            assert api.rpc_sync("worker1", double_and_add, (x,)).tolist() == [3.0] * 3
            future = api.rpc_async("worker1", double_and_add, (x,))
            assert future.wait().tolist() == [3.0] * 3
    events: Any = seen.function_events
    for kind in ("sync", "async"):
        key = f"rpc_{kind}#double_and_add(worker0 -> worker1)"
        (call,) = (event for event in events if event.name == key)
        assert (call.node_id, call.is_remote) == (0, False)
        there = [event for event in events if event.name.startswith(f"{key}#remote_op: ")]
        assert {"doubled", "aten::mul", "aten::add"} <= {e.name.split(": ")[1] for e in there}
        assert all((event.node_id, event.is_remote) == (1, True) for event in there)
        assert min(event.time_range.start for event in there) > call.time_range.start
        (add,) = (event for event in there if event.name.endswith("aten::add"))
        assert add.input_shapes[0] == [3]


def test_operations_two_calls_away_have_their_worker() -> None:
    with Cluster(3) as cluster, cluster.on(0), profile() as seen:
        api.rpc_sync("worker1", double_elsewhere, (torch.ones(1),))
    events: Any = seen.function_events
    assert {e.node_id for e in events if e.name.endswith("aten::mul")} == {2}


def test_errors_and_other_kinds_of_calls_are_as_without_a_profiler() -> None:
    with Cluster(2) as cluster, cluster.on(0), profile() as seen:
        try:
            api.rpc_async("worker1", int, ("x",)).wait()
        except ValueError as error:
            told = str(error)
        assert api.rpc_sync("worker1", later, (torch.ones(1),)).item() == 2.0
        assert api.remote("worker1", later, (torch.ones(1),)).to_here().item() == 2.0
    assert "worker1" in told
    events: Any = seen.function_events
    names = {event.name for event in events}
    assert {"rpc_sync#later(worker0 -> worker1)", "rpc_remote#later(worker0 -> worker1)"} <= names
