"""What workers do together: gathering, and the end when nothing is under way any more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dure.errors import PeerLost, RpcError
from dure.rpc import api
from dure.rpc.current import current
from dure.rpc.termination import all_gather, wait_all_workers, wait_for_own
from tests.rpc.gates import Cluster, Gate, wait_at_gate
from tests.waiting import until

ran: list[int] = []


def pass_on(left: int) -> None:
    """Call the next worker, and do not wait for it."""
    ran.append(left)
    if left:
        api.rpc_async((current().me.id + 1) % 3, pass_on, (left - 1,))


def test_values_are_gathered() -> None:
    with Cluster(3) as cluster:
        wanted = {"worker0": 0, "worker1": 10, "worker2": 20}

        def work(id: int) -> Any:
            return [all_gather(current(), id * 10 + n) for n in range(3)]

        got = cluster.everywhere(work)
        assert got == [[{k: v + n for k, v in wanted.items()} for n in range(3)]] * 3


def num_waiting(cluster: Cluster, function: str) -> int:
    """Return how many calls of a function wait for an answer."""
    calls = [call for agent in cluster.agents for call in agent.calls.all()]
    return sum(call.function == function for call in calls)


def killed_while_others_wait(
    cluster: Cluster, dead: int, work: Callable[[int], object]
) -> list[int]:
    """Kill a worker that does not take part, when all others wait; return who has ended."""

    def run(id: int) -> int:
        with cluster.on(id):
            work(id)
        return id

    others = [id for id in range(len(cluster.agents)) if id != dead]
    with ThreadPoolExecutor(len(others)) as pool:
        ended = pool.map(run, others)
        until(lambda: num_waiting(cluster, "enter") == len(others), "the others to wait")
        cluster.network.kill(dead)
        return list(ended)


def test_a_death_ends_a_gathering() -> None:
    with Cluster(3) as cluster:

        def work(id: int) -> None:
            with pytest.raises(PeerLost, match="worker2"):
                all_gather(current(), id, timeout=0)

        assert killed_while_others_wait(cluster, 2, work) == [0, 1]


def test_the_end_waits_for_calls_that_nobody_waits_for() -> None:
    ran.clear()
    with Cluster(3) as cluster:

        def work(id: int) -> int:
            pass_on(50)
            wait_all_workers(current())
            return len(ran)

        assert cluster.everywhere(work) == [3 * 51] * 3


def test_the_time_of_the_end_may_be_over() -> None:
    with Cluster(2) as cluster:
        with cluster.on(0):
            api.rpc_async("worker1", wait_at_gate)

        def work(id: int) -> None:
            with pytest.raises(RpcError, match="more than set timeout"):
                wait_all_workers(current(), timeout=0.3)

        cluster.everywhere(work)  # a call runs


@pytest.mark.parametrize("dead", [0, 1])
def test_who_dies_counts_as_done_and_the_next_leads(dead: int) -> None:
    with Cluster(3) as cluster:
        others = [id for id in range(3) if id != dead]
        ended = killed_while_others_wait(cluster, dead, lambda _: wait_all_workers(current()))
        assert ended == others


def test_where_processes_come_and_go_each_waits_for_its_own_calls() -> None:
    with Cluster(2, static=False) as cluster, cluster.on(0) as agent:
        future = api.rpc_async("worker1", wait_at_gate)
        with pytest.raises(RpcError):
            wait_for_own(agent, timeout=0.05)
        Gate.open.set()
        wait_for_own(agent)
        assert future.done()
