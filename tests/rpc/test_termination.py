"""What workers do together: gathering, and the end when nothing is under way any more."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

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


def _bytes_sent(size: int, work: Callable[[int], object]) -> list[int]:
    """Let all workers work; return how many bytes each has sent and received, the leader last."""
    with Cluster(size) as cluster:
        moved = Counter[int]()
        send = cluster.network.send

        def counted(to: int, sender: int, raw: bytes, memories: Sequence[torch.Tensor]) -> None:
            moved[sender] += len(raw)
            moved[to] += len(raw)
            send(to, sender, raw, memories)

        cluster.network.send = counted
        cluster.everywhere(work)
    return [moved[id] for id in range(1, size)] + [moved[0]]


WAITS: dict[str, Callable[[int], object]] = {
    "barrier": lambda _: all_gather(current(), None, returns_values=False),
    "end": lambda _: wait_all_workers(current()),
}


@pytest.mark.parametrize("wait", WAITS)
def test_bytes_of_a_worker_that_waits_for_all_do_not_grow_with_256_workers(wait: str) -> None:
    few, many = (statistics.median(_bytes_sent(size, WAITS[wait])) for size in (4, 256))
    # Names are longer by two characters, and in the end the leader may ask more often.
    assert many < 1.5 * few


def test_names_that_the_leader_does_not_know_are_sent() -> None:
    """Workers 1 to 3 gather, and worker 1 knows four."""
    names = [f"worker{id}" for id in (1, 2, 3)]
    with Cluster(4) as cluster:

        def work(id: int) -> Any:
            return [all_gather(current(), id + n, names) for n in range(2)] if id else None

        wanted = [{f"worker{id}": id + n for id in (1, 2, 3)} for n in range(2)]
        assert cluster.everywhere(work) == [None, wanted, wanted, wanted]


def test_a_death_that_the_leader_knows_of_ends_a_gathering_of_others_that_do_not() -> None:
    """The names of a worker that has not heard of the death have another digest."""
    with Cluster(4) as cluster:
        cluster.network.kill(3)
        names = [f"worker{id}" for id in range(4)]

        def work(id: int) -> None:
            with pytest.raises(PeerLost, match="worker3"):
                all_gather(current(), id, names, timeout=0)

        for id in range(3):
            with cluster.on(id):
                work(id)
