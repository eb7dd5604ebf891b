"""Remote references: values, who holds them, proxies, deaths, orders of messages."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from dure.errors import PeerLost, RpcError
from dure.rpc import api
from dure.rpc.allow import Allowed
from dure.rpc.functions import async_execution
from dure.rpc.message import MessageType, RpcMessage
from dure.rpc.rref import RRef
from tests.rpc.gates import Cluster, Gate, add, fail, held, wait_at_gate
from tests.waiting import PATIENCE_S, until


class Counter:
    """A value with methods."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def increase(self, by: int) -> int:
        self.count += by
        return self.count

    @async_execution
    def increase_by_remote(self, to: str, by: int) -> torch.futures.Future[Any]:
        return api.rpc_async(to, add, (by, 0)).then(lambda done: self.increase(done.wait()))


kept: list[RRef[Any]] = []


def keep(rref: RRef[Any]) -> None:
    kept.append(rref)


def kept_value() -> Any:
    return kept[0].to_here()


def let_go() -> None:
    kept.clear()


def same(value: Any) -> Any:
    return value


def sum_of(*rrefs: RRef[Any]) -> Any:
    return sum(rref.to_here() for rref in rrefs)


def figure(cluster: Cluster, name: str, *ids: int) -> int:
    """Return a figure of references, summed over workers (all of them)."""
    agents = [cluster.agents[id] for id in ids or range(len(cluster.agents))]
    return sum(int(agent.debug_info()[name]) for agent in agents)


def freed(cluster: Cluster) -> None:
    """Wait until no worker refers to another's value, and none keeps its own for that."""
    gc.collect()  # once: what tests drop is in no circle, but for errors that pytest has caught
    until(
        lambda: not any(map(held, cluster.agents)),
        lambda: str([*map(held, cluster.agents)]),
    )
    settled(cluster)


def settled(cluster: Cluster) -> None:
    """Wait until all holds stand."""
    until(lambda: figure(cluster, "num_pending_users") == 0, "holds to be settled")


def test_a_value_is_made_there_and_fetched() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        rref = api.remote("worker1", add, (torch.ones(2), 1))
        assert torch.equal(rref.to_here(), torch.full((2,), 2.0))
        assert (rref.owner_name(), rref.owner().id, rref.is_owner()) == ("worker1", 1, False)
        until(rref.confirmed_by_owner, "the owner to know")
        with pytest.raises(RpcError, match="localValue"):
            rref.local_value()
        assert rref._get_future().wait() is None
        assert rref._get_type() is torch.Tensor
        own = api.remote("worker0", add, (1, 2))
        assert own.is_owner()
        assert own.to_here() == own.local_value() == 3
        del rref, own
        freed(cluster)


def test_a_value_that_is_fetched_at_once_needs_no_other_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dure.rpc.directory._LATER_S", 600.0)  # nothing goes by itself
    with Cluster(2) as cluster, cluster.on(0):
        plain, sent = cluster.network.send, list[RpcMessage]()

        def send(to: int, sender: int, raw: bytes, memories: Any) -> None:
            if sender == 1:
                sent.append(msgspec.msgpack.decode(raw, type=RpcMessage))
            plain(to, sender, raw, memories)

        cluster.network.send = send
        rref = api.remote("worker1", add, (1, 2))
        assert rref.to_here() == 3
        assert [(message.kind, message.link) for message in sent] == [(MessageType.ANSWER, ())]
        assert rref.confirmed_by_owner()
        assert rref._get_future().done()
        assert rref.to_here() == 3
        assert sent[1].make is None  # it is told once


def test_a_value_that_is_not_fetched_is_confirmed_soon() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        made, failed = api.remote("worker1", add, (1, 2)), api.remote("worker1", fail, ("bad",))
        until(made.confirmed_by_owner, "the owner's word")
        until(failed.confirmed_by_owner, "the owner's word")
        assert made._get_future().wait() is None


def test_a_value_whose_answer_cannot_be_sent_is_confirmed_all_the_same() -> None:
    with Cluster(2) as cluster, cluster.on(0) as agent:
        plain, failures = cluster.network.send, [MemoryError("no memory for the answer")]

        def send(to: int, sender: int, raw: bytes, memories: Any) -> None:
            kind = msgspec.msgpack.decode(raw, type=RpcMessage).kind
            if (sender, kind) == (1, MessageType.ANSWER) and failures:
                raise failures.pop()
            plain(to, sender, raw, memories)

        cluster.network.send = send
        rref = api.remote("worker1", wait_at_gate, (5,))
        Gate.wait_for()
        threading.Timer(0.05, Gate.open.set).start()  # the fetch comes first
        with pytest.raises(MemoryError, match="no memory for the answer"):
            rref.to_here()
        until(rref.confirmed_by_owner, "the owner's word")
        assert (agent.calls.all(), rref.to_here()) == ([], 5)


def test_the_error_of_a_call_is_raised_by_each_fetch_and_by_those_it_was_passed_to() -> None:
    with Cluster(3) as cluster, cluster.on(0):
        rref = api.remote("worker1", fail, ("bad",))
        for _ in range(2):
            with pytest.raises(ValueError, match="bad"):
                rref.to_here()
        with pytest.raises(ValueError, match="bad"):
            api.rpc_sync("worker2", RRef.to_here, (rref,))
        until(rref.confirmed_by_owner, "the owner's word")


def test_one_passed_on_and_deleted_before_its_call_ends_is_kept_for_the_other() -> None:
    with Cluster(3) as cluster, cluster.on(0):
        rref = api.remote("worker1", wait_at_gate, (5,))
        Gate.wait_for()
        fetched = api.rpc_async("worker2", RRef.to_here, (rref,))
        assert not rref.confirmed_by_owner()
        del rref
        gc.collect()
        assert not fetched.done()
        Gate.open.set()
        assert fetched.wait() == 5
        freed(cluster)


def test_it_is_waited_for_though_it_is_not_made_yet() -> None:
    with Cluster(3, slots=1) as cluster, cluster.on(0):
        rref = api.remote("worker1", wait_at_gate, (5,))
        futures = [api.rpc_async(f"worker{n}", sum_of, (rref, rref)) for n in range(3)]
        with pytest.raises(RpcError, match="more than set timeout"):
            rref.to_here(timeout=0.01)
        Gate.open.set()
        assert [future.wait() for future in futures] == [10, 10, 10]


def test_a_small_value_is_fetched_while_all_threads_of_its_owner_run_calls() -> None:
    with Cluster(2, slots=1) as cluster, cluster.on(0):
        values = [None, 2.5, "text", b"bytes", torch.ones(3)]
        rrefs = [api.remote("worker1", same, (value,)) for value in values]
        failed = api.remote("worker1", fail, ("bad",))
        assert api.rpc_sync("worker1", add, (1, 1)) == 2  # after them
        busy = api.rpc_async("worker1", wait_at_gate, (5,))
        Gate.wait_for()
        assert [rref.to_here() for rref in rrefs[:4]] == values[:4]
        assert torch.equal(rrefs[4].to_here(), torch.ones(3))
        with pytest.raises((ValueError, RpcError), match="bad"):
            failed.to_here()
        assert not busy.done()
        Gate.open.set()
        assert busy.wait() == 5


def test_a_value_whose_owner_dies_while_it_makes_it_is_lost_with_its_owner() -> None:
    with Cluster(3) as cluster, cluster.on(0) as agent:
        rref = api.remote("worker1", wait_at_gate, (5,))
        Gate.wait_for()
        cluster.network.kill(1)
        until(lambda: agent.lost(1), "the death")
        for use in (
            rref.to_here,
            rref.rpc_sync().bit_length,
            rref.rpc_async().bit_length,
            rref.remote().bit_length,
            lambda: api.rpc_sync("worker2", sum_of, (rref,)),
        ):
            with pytest.raises(PeerLost) as caught:
                use()
            assert caught.value.peer == 1


def test_a_reference_that_was_guessed_or_dropped_is_not_answered() -> None:
    with Cluster(3, allow=Allowed([add, keep])) as cluster:
        with cluster.on(1) as owner:
            secret = RRef("secret")
            api.rpc_sync("worker2", keep, (secret,))
        try:
            with cluster.on(0) as agent:
                for guess in ((1, 1), (2, 1), (0, 99)):
                    with pytest.raises(RpcError, match=r"no such reference|set timeout"):
                        agent.caller.fetch(guess, owner.me, 0.05)
            assert owner.debug_info()["num_owner_rrefs"] == "1"
            with cluster.on(2):
                assert kept_value() == "secret"
        finally:
            let_go()
        ref = secret._ref
        del secret
        freed(cluster)
        with cluster.on(2) as agent, pytest.raises(RpcError, match="no such reference"):
            agent.caller.fetch(ref, owner.me, PATIENCE_S)


def newest_kept_value() -> Any:
    return kept[-1].to_here()


def test_a_fetch_that_overtakes_the_hold_is_answered() -> None:
    with Cluster(3) as cluster:
        late = list[Callable[[], None]]()
        plain = cluster.network.send

        def send(to: int, sender: int, raw: bytes, memories: Any) -> None:
            if (sender, to) == (0, 1) and not late:
                late.append(lambda: plain(to, sender, raw, memories))
            else:
                plain(to, sender, raw, memories)

        try:
            with cluster.on(1):
                rref = RRef(7)
                api.rpc_sync("worker2", keep, (rref,))
            with cluster.on(2):
                cluster.network.send = send
                api.rpc_sync("worker0", keep, (kept[0],))
                until(lambda: late, "the hold")
                assert api.rpc_sync("worker0", newest_kept_value) == 7
                late[0]()
        finally:
            let_go()
        del rref
        freed(cluster)


def test_proxies_call_methods_at_the_owner() -> None:
    with Cluster(2) as cluster, cluster.on(0):
        for rref in (api.remote("worker1", Counter, (1,)), RRef(Counter(1))):
            assert rref.rpc_sync().increase(2) == 3
            assert rref.rpc_async().increase(by=2).wait() == 5
            assert rref.remote().increase(1).to_here() == 6
            assert rref.rpc_sync().increase_by_remote("worker0", 4) == 10
            for proxy in (rref.rpc_sync(), rref.remote()):  # nobody may ask a reference for it
                with pytest.raises(AttributeError, match="has no attribute 'decrease'"):
                    proxy.decrease()
        slow = api.remote("worker1", wait_at_gate, (Counter(),))
        with pytest.raises(RpcError, match="more than set timeout"):
            slow.rpc_sync(timeout=0.01).increase(1)


def test_a_value_lives_as_long_as_somebody_refers_to_it() -> None:
    with Cluster(3) as cluster:
        try:
            with cluster.on(0):
                rref = RRef(7)
                api.rpc_sync("worker1", keep, (rref,))
                info = api._rref_context_get_debug_info()
                assert info["num_owner_rrefs"] == "1"
                del rref
            gc.collect()
            settled(cluster)
            assert figure(cluster, "num_owner_rrefs") == 1
            with cluster.on(2):
                assert api.rpc_sync("worker1", kept_value) == 7
                api.rpc_sync("worker1", let_go)
            freed(cluster)
        finally:
            kept.clear()


def test_a_reference_is_of_no_use_outside_of_messages_and_after_the_end() -> None:
    with Cluster(2) as cluster, cluster.on(0) as agent:
        rref = api.remote("worker1", add, (1, 1))
        with pytest.raises(RpcError, match="Can not pickle rref in python pickler"):
            pickle.dumps(rref)
        agent.close()
        with pytest.raises(RpcError, match=r"Cannot call to_here\(\) on it after deletion"):
            rref.to_here()


class Ends:
    """A value that says when it ends."""

    ended = threading.Event()

    def __del__(self) -> None:
        Ends.ended.set()


def test_finalizers_take_no_locks() -> None:
    Ends.ended.clear()
    with Cluster(1) as cluster, cluster.on(0) as agent:
        rref: list[Any] = [RRef(Ends())]
        with agent.lock:
            rref.clear()  # would wait for ever, did it need the lock
        assert Ends.ended.wait(PATIENCE_S)
