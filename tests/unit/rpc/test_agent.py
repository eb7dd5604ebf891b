"""Calls: values, errors, timeouts, threads, broken connections, deaths."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
import torch

from dure.errors import PeerLost, RpcError, UsageError
from dure.rpc import api
from dure.rpc import calls as module
from dure.rpc.allow import Allowed
from dure.rpc.envelope import Envelope
from dure.rpc.functions import async_execution
from dure.rpc.names import WorkerInfo
from dure.testing.rpc import Cluster


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if done():
            return
        threading.Event().wait(0.005)
    raise AssertionError("not in time")


class Gate:
    """Lets calls wait for the test; there is one at a time."""

    reached = threading.Semaphore(0)
    open = threading.Event()

    @classmethod
    def renew(cls) -> None:
        cls.reached, cls.open = threading.Semaphore(0), threading.Event()


@pytest.fixture(autouse=True)
def _gate() -> Any:
    Gate.renew()
    yield
    Gate.open.set()


def who(value: int = 0) -> tuple[str, int]:
    return api.get_worker_info().name, value


def add(a: Any, b: Any) -> Any:
    return a + b


def wait_at_gate(value: Any = None) -> Any:
    Gate.reached.release()
    assert Gate.open.wait(60.0)
    return value


class Unpacked:
    """Waits at the gate where it is unpacked."""

    def __reduce__(self) -> Any:
        return wait_at_gate, ("unpacked",)


def fail(text: str) -> None:
    raise ValueError(text)


class OddError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"odd {one} {two}")


def fail_oddly() -> None:
    raise OddError(1, 2)


def relay(path: list[str], value: int) -> list[tuple[str, int]]:
    here = [who(value)]
    return here if not path else here + api.rpc_sync(path[0], relay, (path[1:], value + 1))


@async_execution
def add_there(to: str, a: Any, b: Any) -> torch.futures.Future[Any]:
    return api.rpc_async(to, add, (a, b)).then(lambda done: done.wait() + 1)


@async_execution
def no_future() -> Any:
    return 3


class Methods:
    @async_execution
    def none(self) -> Any:
        return 3

    @staticmethod
    @async_execution
    def static(to: str, a: int) -> torch.futures.Future[Any]:
        return api.rpc_async(to, add, (a, 10))

    def named(self, name: str) -> str:
        return name

    @classmethod
    @async_execution
    def of_class(cls, to: str, a: int) -> torch.futures.Future[Any]:
        return api.rpc_async(to, add, (a, 20))


def test_values_come_back_from_who_was_called() -> None:
    with Cluster(3) as cluster, cluster.on(0):
        assert api.rpc_sync("worker1", who, (5,)) == ("worker1", 5)
        assert api.rpc_sync(2, who, kwargs={"value": 6}) == ("worker2", 6)
        assert api.rpc_sync(WorkerInfo("worker0", 0), who) == ("worker0", 0)
        assert torch.equal(
            api.rpc_sync("worker1", torch.add, (torch.ones(3), 1)), torch.full((3,), 2.0)
        )
        assert api.rpc_async("worker1", add, ([1], [2])).wait() == [1, 2]


def test_tensors_are_copied_and_share_memory_as_before() -> None:
    ones = torch.ones(2, 3)
    with Cluster(2) as cluster, cluster.on(0):
        got = api.rpc_sync("worker1", add, ([ones, ones[0]], [ones.t()]))
        got[0].zero_()
        assert got[1].sum() == 0
        assert got[2].sum() == 0
        assert ones.sum() == 6


def test_an_exception_has_its_type_and_says_where_it_was_raised() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        with pytest.raises(ValueError, match="no good") as caught:
            api.rpc_sync("worker1", fail, ("no good",))
        assert "WorkerInfo(id=1, name=worker1)" in str(caught.value)
        assert "in fail" in vars(caught.value)["remote_traceback"]
        with pytest.raises(ValueError, match="no good"):
            api.rpc_async("worker1", fail, ("no good",)).wait()
        with pytest.raises(RpcError, match="Original exception on remote side was OddError"):
            api.rpc_sync("worker1", fail_oddly)
        with pytest.raises(TypeError):
            api.rpc_sync("worker1", add, (1,))


def test_what_cannot_be_sent_is_refused_at_the_caller() -> None:
    with Cluster(2) as cluster, cluster.on(0) as agent:
        for call in (api.rpc_sync, api.rpc_async, api.remote):
            with pytest.raises(RpcError, match="cannot be sent"):
                call("worker1", lambda: 1)
            with pytest.raises(UsageError):
                call("worker1", 3)  # pyright: ignore[reportArgumentType]
            with pytest.raises(UsageError):
                call(1.5, add)  # pyright: ignore[reportArgumentType]
            with pytest.raises(UsageError, match=r"args=\(x,\)"):
                call("worker1", add, 1)  # pyright: ignore[reportArgumentType]
            with pytest.raises(UsageError, match=r"args=\(x,\)"):
                call("worker1", add, torch.ones(2))  # pyright: ignore[reportArgumentType]
            with pytest.raises(UsageError, match="kwargs="):
                call("worker1", add, (1,), 2)  # pyright: ignore[reportArgumentType]
            with pytest.raises(RpcError, match="could not find destination"):
                call("worker7", add)
            with pytest.raises(RpcError, match="could not find destination"):
                call(-1, add)
        with pytest.raises(RpcError, match="cannot be sent"):  # the answer
            api.rpc_sync("worker1", lambda_maker)
        wait_until(lambda: agent.activity()[1] == 0)


def lambda_maker() -> Any:
    return lambda: 1


def test_calls_nest_and_a_waiting_one_needs_no_slot() -> None:
    with Cluster(2, slots=1) as cluster, cluster.on(0):
        got = api.rpc_sync("worker1", relay, (["worker0", "worker1"] * 4, 0))
        assert got == [(f"worker{1 - n % 2}", n) for n in range(9)]
        assert api.rpc_sync("worker0", relay, (["worker0"], 0)) == [("worker0", 0), ("worker0", 1)]


def test_functions_that_return_futures() -> None:
    with Cluster(3, slots=1) as cluster, cluster.on(0):
        assert api.rpc_sync("worker1", add_there, ("worker2", 1, 2)) == 4
        assert api.remote("worker1", add_there, ("worker2", 1, 2)).to_here() == 4
        assert api.rpc_async("worker1", Methods.static, ("worker1", 1)).wait() == 11
        assert api.rpc_sync("worker1", Methods.of_class, ("worker0", 1)) == 21
        with pytest.raises(RuntimeError, match="unsupported operand"):  # as callbacks of torch do
            api.rpc_sync("worker1", add_there, ("worker2", 1, "two"))
        with pytest.raises(RpcError, match=r"must return a torch\.futures\.Future"):
            api.rpc_sync("worker1", no_future)
        of_methods = api.remote("worker1", Methods)
        with pytest.raises(RpcError, match=r"must return a torch\.futures\.Future"):
            of_methods.rpc_sync().none()
        assert of_methods.rpc_sync().named(name="a name") == "a name"
        wait_until(lambda: cluster.agents[1].activity()[1] == 0)  # else no shutdown would end


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
        wait_until(lambda: agent.activity()[1] == 0)


def test_a_result_is_unpacked_once_though_somebody_begins_to_wait_meanwhile() -> None:
    """Unpacked twice, its tensors would have two places in the graph of distributed autograd."""
    with Cluster(2) as cluster, cluster.on(0):
        future = api.rpc_async("worker1", Unpacked)
        assert Gate.reached.acquire(timeout=20)  # a thread of the caller's unpacks it
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(future.wait()))
        waiting.start()
        waiting.join(0.2)
        Gate.open.set()
        waiting.join(20)
        assert got == ["unpacked"]
        assert not Gate.reached.acquire(blocking=False)


def test_futures_of_torch_are_completed_though_nobody_waits() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        futures = [api.rpc_async("worker1", add, (n, 1)) for n in range(50)]
        assert torch.futures.wait_all(futures) == list(range(1, 51))
        called = threading.Event()
        api.rpc_async("worker1", add, (1, 1)).add_done_callback(lambda _: called.set())
        assert called.wait(60.0)
        with pytest.raises(ValueError, match="bad"), api._wait_all():
            api.rpc_async("worker1", fail, ("bad",))


@pytest.mark.parametrize("combined", [False, True])
def test_no_callback_runs_in_a_thread_that_waits(combined: bool) -> None:
    """It may want what that thread has, or will do next."""
    with Cluster(2) as cluster, cluster.on(0):
        waiting = threading.Lock()

        def then(done: object) -> bool:
            return waiting.acquire(timeout=20)

        future = api.rpc_async("worker1", wait_at_gate, (5,))
        source: Any = torch.futures.collect_all([future]) if combined else future
        after = source.then(then)
        with waiting:
            assert Gate.reached.acquire(timeout=20)
            Gate.open.set()
            if combined:  # the answer comes while the thread waits for another call
                while not future.done():
                    api.rpc_sync("worker1", add, (1, 1))
            else:
                assert future.wait() == future.value() == 5
            assert not after.done()
        assert after.wait()
        assert future.wait() == 5


def interrupt(*_: object) -> bool:
    raise KeyboardInterrupt


def test_a_future_whose_waiting_thread_is_interrupted_is_done_all_the_same() -> None:
    with Cluster(2) as cluster, cluster.on(0) as agent:
        future = api.rpc_async("worker1", wait_at_gate, (5,))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agent.transport, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                future.wait()
        Gate.open.set()
        wait_until(future.done)

        future = api.rpc_async("worker1", add, (1, 1))
        wait = agent.transport.wait
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agent.transport, "wait", lambda *them: wait(*them) and interrupt())
            with pytest.raises(KeyboardInterrupt):
                future.wait()
        wait_until(future.done)
        assert future.wait() == 2


class Exits:
    def __reduce__(self) -> Any:
        return sys.exit, (3,)


def test_a_value_that_exits_where_it_is_unpacked_ends_the_call_alone() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        future = api.rpc_async("worker1", Exits)
        wait_until(future.done)
        with pytest.raises(SystemExit, match="3"):
            future.wait()
        assert api.rpc_sync("worker1", add, (1, 2)) == 3


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


def test_an_error_kept_for_others_grows_no_traceback_and_keeps_no_frames() -> None:
    with Cluster(1) as cluster, cluster.on(0):
        ref = api.remote("worker0", keep_and_fail)

        def traceback_of_error() -> TracebackType | None:
            with pytest.raises(ValueError, match="kept") as raised:
                ref.local_value()
            return raised.value.__traceback__

        lengths = {len(list(traceback.walk_tb(traceback_of_error()))) for _ in range(5)}
        assert len(lengths) == 1
        frames = [frame for frame, _ in traceback.walk_tb(traceback_of_error())]
        assert "keep_and_fail" in {frame.f_code.co_name for frame in frames}
        gc.collect()
        assert Kept.alive() is None


class Kept:
    alive: Callable[[], object]


def keep_and_fail() -> None:
    kept = Kept()
    Kept.alive = weakref.ref(kept)
    raise ValueError("kept")


def test_many_threads_call_at_once() -> None:
    with Cluster(3) as cluster:

        def work(id: int) -> list[int]:
            futures = [
                api.rpc_async((id + n) % 3, relay, ([f"worker{n % 3}"], n)) for n in range(60)
            ]
            return [future.wait()[1][1] for future in futures]

        assert cluster.everywhere(work) == [list(range(1, 61))] * 3


def test_a_broken_connection_ends_calls_and_nothing_is_called_twice() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        cluster.network.hold(0, 1)
        lost = api.rpc_async("worker1", wait_at_gate)
        cluster.network.cut(0, 1)
        with pytest.raises(RpcError, match="may have run"):
            lost.wait()
        ran = api.rpc_async("worker1", wait_at_gate)
        assert Gate.reached.acquire(timeout=60.0)
        cluster.network.cut(0, 1)
        with pytest.raises(RpcError, match="may have run"):
            ran.wait()
        Gate.open.set()
        assert api.rpc_sync("worker1", add, (1, 2)) == 3
        assert not Gate.reached.acquire(blocking=False)


def test_what_must_arrive_does_over_broken_connections_in_order() -> None:
    with Cluster(2) as cluster:
        one, other = cluster.agents
        got, lock = list[bytes](), threading.Lock()

        def take(sender: int, body: bytes) -> None:
            with lock:
                got.append(body)

        other.on(7, take)
        for n in range(30):
            if n % 3 == 0:
                cluster.network.hold(0, 1)
            one.tell(1, 7, bytes([n]))
            if n % 3 == 1:
                cluster.network.cut(0, 1)
        cluster.network.release(0, 1)
        wait_until(lambda: len(got) == 30)
        assert sorted(got) == [bytes([n]) for n in range(30)]
        wait_until(lambda: not one.directory._peers[1].link.kept)


def test_a_death_ends_the_calls_that_wait_for_it() -> None:
    with Cluster(3) as cluster, cluster.on(0):
        waiting = [api.rpc_async("worker1", wait_at_gate) for _ in range(3)]
        nested = api.rpc_async("worker2", relay, (["worker1"], 0))
        nested.wait()
        for _ in waiting:
            assert Gate.reached.acquire(timeout=60.0)
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


def test_the_program_waits_when_too_much_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    done = list[int]()
    with Cluster(2) as cluster:

        def work() -> None:
            with cluster.on(0):
                for n in range(3):
                    api.rpc_async("worker1", wait_at_gate, (b"x" * 400,))
                    done.append(n)

        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(2):
            assert Gate.reached.acquire(timeout=60.0)
        wait_until(lambda: bool(cluster.agents[0].directory._peers[1].blocked))
        assert done == [0, 1]
        with cluster.on(1):  # answers, and calls of calls, do not wait
            assert api.rpc_sync("worker0", relay, (["worker1"], 0))[1] == ("worker1", 1)
        Gate.open.set()
        thread.join(60.0)
        assert done == [0, 1, 2]


def test_a_list_of_what_may_be_called() -> None:
    with Cluster(2, allow=Allowed([add, Methods])) as cluster, cluster.on(0):
        assert api.rpc_sync("worker1", add, (1, torch.ones(1))).item() == 2
        with pytest.raises(RpcError, match="does not let others call"):
            api.rpc_sync("worker1", who)
        with pytest.raises(RpcError, match="does not let others call"):
            api.rpc_sync("worker1", torch.add, (torch.ones(1), 1))
        with pytest.raises(RpcError, match="does not let others call"):
            api.rpc_sync("worker1", complex, (1,))  # which a pickle may name


def test_results_go_back_by_the_callers_device_map() -> None:
    one, two, three = (torch.device("cuda", n) for n in (1, 2, 3))
    with Cluster(2) as cluster:
        here, there = cluster.agents
        here.device_maps = {"worker1": {one: two}}
        there.device_maps = {"worker0": {three: one}}
        calls = list[Envelope]()
        receive = there.receive
        there.receive = lambda envelope, memories: (
            calls.append(envelope),
            receive(envelope, memories),
        )[1]
        assert here.rpc_sync("worker1", add, (1, 2)) == 3
        assert calls[0].devices == {"cuda:2": "cuda:1"}
        assert here._device_there(there.me, one) == "cuda:2"
        assert there._device_back(calls[0], two) == "cuda:1"
        assert there._device_back(calls[0], three) == "cuda:1"  # by its own map
        for device in (one, torch.device("cuda", 7)):
            with pytest.raises(ValueError, match="no device map"):
                there._device_back(calls[0], device)


def test_closing_ends_calls() -> None:
    with Cluster(2) as cluster, cluster.on(0) as agent:
        future = api.rpc_async("worker1", wait_at_gate)
        assert Gate.reached.acquire(timeout=60.0)
        agent.close()
        with pytest.raises(RpcError, match="shut down"):
            future.wait()
        with pytest.raises(RpcError, match="shut down"):
            api.rpc_sync("worker1", who)
        Gate.open.set()


def test_a_reference_whose_call_was_lost_is_settled() -> None:
    with Cluster(2) as cluster:
        agent = cluster.agents[0]
        cluster.network.hold(0, 1)
        rref = agent.remote("worker1", add, (1, 2))
        cluster.network._held[0, 1].clear()  # and only this side knows
        cluster.network.release(0, 1)
        agent.broken(1)
        wait_until(lambda: agent.debug_info()["num_pending_users"] == "0")
        with pytest.raises(RpcError, match="may have run"):
            rref.to_here()


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail_without_text() -> None:
    raise NoTextError


def fail_with_half_a_character() -> None:
    raise ValueError(b"\xff".decode(errors="surrogateescape"))


def fail_far(path: list[str]) -> None:
    if not path:
        raise ValueError("far")
    api.rpc_sync(path[0], fail_far, (path[1:],))


def test_every_exception_is_an_answer() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        with pytest.raises(NoTextError) as caught:
            api.rpc_sync("worker1", fail_without_text)
        assert caught.value.args[0].startswith("its text cannot be had: RuntimeError")
        with pytest.raises(ValueError, match=r"^\\udcff"):
            api.rpc_sync("worker1", fail_with_half_a_character)


def test_an_exception_that_comes_a_long_way_has_each_text_once() -> None:
    with Cluster(3) as cluster, cluster.on(0):
        with pytest.raises(ValueError, match=r"^far\n") as caught:
            api.rpc_sync("worker1", fail_far, (["worker2", "worker1"] * 5,))
        text = str(caught.value)
        assert text.count("On WorkerInfo") == 11
        assert text.count('raise ValueError("far")') == 1


def test_timeouts_may_be_longer_than_clocks_count() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        assert api.rpc_sync("worker1", add, (1, 2), timeout=1e300) == 3
        assert api.rpc_sync("worker1", add, (1, 2), timeout=float("inf")) == 3
        with pytest.raises(RpcError, match="set timeout"):
            api.rpc_sync("worker1", wait_at_gate, timeout=0.001)
        Gate.open.set()


def test_what_cannot_be_sent_leaves_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    none: Any = None
    text: Any = "1"
    with Cluster(2) as cluster, cluster.on(0) as agent:
        ref = api.RRef(1)
        with pytest.raises(UsageError, match="a timeout is a number of seconds"):
            api.rpc_sync("worker1", add, (ref, 1), timeout=text)
        assert agent.debug_info()["num_pending_users"] == "0"
        with pytest.raises(UsageError, match="a timeout is a number of seconds"):
            api.rpc_sync("worker1", add, (1, 2), timeout=none)
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
        wait_until(lambda: not cluster.agents[1].held() and not agent.held())


def test_a_worker_that_there_never_was_is_not_called() -> None:
    missing = pytest.raises(RpcError, match="could not find destination: 7")
    with Cluster(2) as cluster, cluster.on(0), missing:
        api.rpc_sync(WorkerInfo("worker7", 7), who)


class Farewell:
    """A value that calls when it ends."""

    said: list[Any] = []

    def __del__(self) -> None:
        Farewell.said.append(api.rpc_sync("worker0", add, (1, 2), timeout=20.0))


def test_a_value_that_calls_at_its_end_keeps_nobody_waiting() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        rref = api.remote("worker1", Farewell)
        assert rref._get_type() is Farewell
        del rref
        assert api.rpc_sync("worker1", who, (1,), timeout=20.0) == ("worker1", 1)
        wait_until(lambda: Farewell.said == [3])


def test_a_finalizer_that_runs_in_the_middle_of_a_step_may_not_call() -> None:
    """Python runs those of circles wherever memory is asked for: they would wait for themselves."""
    with Cluster(2) as cluster, cluster.on(0) as agent, agent.lock:
        with pytest.raises(RpcError, match="finalizer"):
            api.rpc_async("worker1", who)
        with pytest.raises(RpcError, match="finalizer"):
            api.rpc_sync("worker1", who)
