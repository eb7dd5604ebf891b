"""Calls that are under way: futures and timeouts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from dure.errors import RpcError
from dure.rpc import api
from dure.rpc.agent import RpcAgent
from dure.rpc.message import FutureCompletion, MessageType, Numbered, RpcMessage
from dure.rpc.references import Held
from tests.rpc.gates import Cluster, Gate, add, fail, wait_at_gate
from tests.waiting import PATIENCE_S, until


class Unpacked:
    """Waits at the gate where it is unpacked."""

    def __reduce__(self) -> Any:
        return wait_at_gate, ("unpacked",)


def test_timeouts() -> None:
    text = "RPC ran for more than set timeout"
    with Cluster(2) as cluster, cluster.on(0) as agent:
        with pytest.raises(RpcError, match=text):
            api.rpc_sync("worker1", wait_at_gate, timeout=0.01)
        with pytest.raises(RpcError, match=text):
            api.rpc_async("worker1", wait_at_gate, timeout=0.01).wait()
        future = api.rpc_async("worker1", wait_at_gate, timeout=0.01)
        with pytest.raises(RpcError, match=text):
            torch.futures.wait_all([future])
        kept = api.rpc_async("worker1", wait_at_gate, (5,))
        api._set_rpc_timeout(0.01)
        assert api.get_rpc_timeout() == 0.01
        unlimited = api.rpc_async("worker1", wait_at_gate, (6,), timeout=0)
        with pytest.raises(RpcError, match=text):
            api.rpc_sync("worker1", wait_at_gate)
        made = api.remote("worker1", wait_at_gate)
        with pytest.raises(RpcError, match=text):
            made._get_future().wait()
        with pytest.raises(RpcError, match="RRef creation"):
            made.to_here()
        Gate.open.set()
        assert (kept.wait(), unlimited.wait()) == (5, 6)
        assert api.rpc_sync("worker1", add, (1, 2), timeout=0) == 3
        until(lambda: agent.activity()[1] == 0, "calls to end")


def test_a_result_is_unpacked_once_though_somebody_begins_to_wait_meanwhile() -> None:
    """Unpacked twice, its tensors would have two places in the graph of distributed autograd."""
    with Cluster(2) as cluster, cluster.on(0) as agent:
        future = api.rpc_async("worker1", Unpacked)
        Gate.wait_for()  # a thread of the caller's unpacks it
        got: list[Any] = []
        in_torch = threading.Event()  # the rest of the wait is torch's
        plain = agent.caller.wait_until_notified
        agent.caller.wait_until_notified = lambda call: (plain(call), in_torch.set())[0]
        waiting = threading.Thread(target=lambda: got.append(future.wait()))
        waiting.start()
        assert in_torch.wait(PATIENCE_S)
        Gate.open.set()
        waiting.join()
        assert got == ["unpacked"]
        assert not Gate.reached.acquire(blocking=False)


def test_futures_of_torch_are_completed_though_nobody_waits() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        futures = [api.rpc_async("worker1", add, (n, 1)) for n in range(50)]
        assert torch.futures.wait_all(futures) == list(range(1, 51))
        called = threading.Event()
        api.rpc_async("worker1", add, (1, 1)).add_done_callback(lambda _: called.set())
        assert called.wait(PATIENCE_S)
        with pytest.raises(ValueError, match="bad"), api._wait_all():
            api.rpc_async("worker1", fail, ("bad",))


@pytest.fixture
def left_uncompleted() -> Iterator[tuple[RpcAgent, list[Any], list[Callable[[], None]]]]:
    """Three futures whose answers a thread has received that waits for something else.

    With the agent, and its timers, which do not expire by themselves.
    """
    with Cluster(2) as cluster, cluster.on(0) as agent:
        timers: list[Callable[[], None]] = []
        agent.timers.at = lambda _, action: timers.append(action)
        cluster.network.hold(1, 0)
        futures = [api.rpc_async("worker1", add, (n, 1), timeout=0) for n in range(3)]
        answers = cluster.network._held[1, 0]
        until(lambda: len(answers) == 3, "the answers")
        for _, deliver in answers:
            assert type(deliver()) is FutureCompletion
            agent.caller.complete_soon()
        answers.clear()
        assert [future.done() for future in futures] == [False] * 3
        yield agent, futures, timers


def test_futures_whose_answers_have_come_are_completed_by_their_waits_or_soon(
    left_uncompleted: tuple[RpcAgent, list[Any], list[Callable[[], None]]],
) -> None:
    agent, futures, timers = left_uncompleted
    assert agent.activity()[1] == 3  # the end of RPC waits for them
    assert futures[0].wait() == 1
    ran_in = futures[1].then(lambda _: threading.get_ident())
    assert ran_in.wait() != threading.get_ident()
    assert futures[1].value() == 2
    (expire,) = timers
    expire()
    assert torch.futures.wait_all(futures) == [1, 2, 3]
    until(lambda: agent.activity()[1] == 0, "the end of all completions")


def test_futures_whose_answers_have_come_are_completed_at_the_end_of_rpc(
    left_uncompleted: tuple[RpcAgent, list[Any], list[Callable[[], None]]],
) -> None:
    agent, futures, _ = left_uncompleted
    agent.close()
    assert [future.done() for future in futures] == [True] * 3
    assert [future.value() for future in futures] == [1, 2, 3]


@pytest.mark.parametrize("combined", [False, True])
def test_no_callback_runs_in_a_thread_that_waits(combined: bool) -> None:
    """It may want what that thread has, or will do next."""
    with Cluster(2) as cluster, cluster.on(0):
        future = api.rpc_async("worker1", wait_at_gate, (5,))
        source: Any = torch.futures.collect_all([future]) if combined else future
        ran_in = source.then(lambda _: threading.get_ident())
        Gate.wait_for()
        Gate.open.set()
        if combined:  # the answer comes while the thread waits for another call
            while not future.done():
                api.rpc_sync("worker1", add, (1, 1))
        else:
            assert future.wait() == future.value() == 5
        assert ran_in.wait() != threading.get_ident()
        assert future.wait() == 5


def test_an_answer_of_another_worker_than_the_callee_is_not_taken() -> None:
    with Cluster(3) as cluster, cluster.on(0) as agent:
        future = api.rpc_async("worker1", wait_at_gate, (5,))
        Gate.wait_for()
        (call,) = agent.calls.all()
        for kind in (MessageType.ANSWER, MessageType.ERROR):
            cluster.agents[2].transport.send(0, RpcMessage(kind, 2, call.number), ())
        assert api.rpc_sync("worker2", add, (1, 1)) == 2  # what came before it was read
        assert not future.done()
        Gate.open.set()
        assert future.wait() == 5


def test_a_value_is_made_when_its_owner_says_so_and_no_other_worker() -> None:
    with Cluster(3) as cluster, cluster.on(0) as agent:
        rref = api.remote("worker1", wait_at_gate, (5,))
        Gate.wait_for()
        (call,) = agent.calls.all()
        assert call.make is not None
        report = Numbered(1, b"\0" + msgspec.msgpack.encode(Held(call.make)))
        in_report = RpcMessage(MessageType.REPORT, 2, link=(report,))
        in_answer = RpcMessage(MessageType.ANSWER, 2, call.number, make=call.make)
        for forged in (in_report, in_answer):
            cluster.agents[2].transport.send(0, forged, ())
        assert api.rpc_sync("worker2", add, (1, 1)) == 2  # what came before it was read
        assert (agent.calls.all(), rref.confirmed_by_owner()) == ([call], False)
        Gate.open.set()
        assert rref.to_here() == 5
        assert (agent.calls.all(), rref.confirmed_by_owner()) == ([], True)


class SlotsError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    __slots__ = ("text",)

    def __str__(self) -> str:
        return self.text


def fail_with_slots() -> None:
    raise SlotsError("in a slot")


def fail_in_syntax() -> None:
    compile("a b", "<text>", "exec")


@pytest.mark.parametrize("function", [fail_with_slots, fail_in_syntax])
def test_futures_raise_what_calls_raise(function: Callable[[], None]) -> None:
    with Cluster(2) as cluster, cluster.on(0):
        with pytest.raises(Exception, match=r"in a slot|invalid syntax") as raised:
            api.rpc_sync("worker1", function)
        future = api.rpc_async("worker1", function)
        for _ in range(2):
            with pytest.raises(type(raised.value), match=r"in a slot|invalid syntax") as again:
                future.wait()
            assert str(again.value) == str(raised.value)
