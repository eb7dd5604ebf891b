"""Who takes part: names, ids, who comes and who goes, as all of them see it."""

from __future__ import annotations

import queue
import subprocess
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec
import pytest

from dure.errors import RendezvousError, StoreError
from dure.rpc import peers as peers_module
from dure.rpc.peers import PeerAddress, Peers
from dure.store import HashStore
from dure.store.builds import Build, own_build
from dure.store.identity import Identity, myself, start_of
from dure.store.wire import Reply, StoreRequest
from tests.waiting import PATIENCE_S

FAR = Identity(1, "then", "elsewhere", "another host")


def peer(name: str, id: int = -1, process: Identity | None = None) -> PeerAddress:
    inbox, endpoint = 64, "tcp://127.0.0.1:1"
    return PeerAddress(name, id, process or myself(), (1, 2, 3), inbox, endpoint, own_build())


def ended() -> Identity:
    """Return a process of this host that has ended."""
    with subprocess.Popen(["sleep", "60"]) as child:
        process = msgspec.structs.replace(myself(), pid=child.pid, start=start_of(child.pid) or "")
        child.kill()
    return process


def meet(names: list[str]) -> list[Peers | Exception]:
    store = HashStore()

    def join(rank: int) -> Peers | Exception:
        try:
            return Peers.meet(store, peer(names[rank], rank), len(names))
        except RendezvousError as error:
            return error

    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(join, range(len(names))))


@pytest.mark.parametrize("build", [Build(), Build(own_build().protocol + 1, own_build().version)])
def test_who_joins_those_of_another_build_is_refused_with_both_named(build: Build) -> None:
    store = HashStore()
    there = Peers.join(store, msgspec.structs.replace(peer("a", process=FAR), build=build))
    with pytest.raises(RendezvousError) as caught:
        Peers.join(store, peer("b"))
    assert f"{build}: a (id 0, pid 1 on elsewhere); {own_build()}: b" in (caught.value.seen or "")
    assert [each.name for each in there.all()] == ["a"]


@pytest.mark.parametrize("names", [["a", "b", "a"], ["a", "b c", "d"], ["a", "", "b"], ["x" * 128]])
def test_a_wrong_name_is_an_error_on_all(names: list[str]) -> None:
    assert all(isinstance(each, RendezvousError) for each in meet(names))


def told(peers: Peers) -> queue.Queue[tuple[str, int, str]]:
    got: queue.Queue[tuple[str, int, str]] = queue.Queue()

    def joined(each: PeerAddress) -> None:
        got.put(("joined", each.id, each.name))

    peers.watch(joined, lambda id, how: got.put(("gone", id, how)))
    return got


def test_those_who_come_and_go_are_told_to_all_in_one_order() -> None:
    store = HashStore()
    a = Peers.join(store, peer("a"))
    seen_by_a = told(a)
    b = Peers.join(store, peer("b"))
    seen_by_b = told(b)
    c = Peers.join(store, peer("c", 7))
    told(c)
    assert (a.own_id, b.own_id, c.own_id) == (0, 1, 7)
    assert a.named("c") == c.me
    a.give_up(1, "signal 9")
    c.close()
    first = [seen_by_a.get(timeout=PATIENCE_S) for _ in range(4)]
    assert first[:2] == [("joined", 1, "b"), ("joined", 7, "c")]
    assert sorted(first[2:]) == [("gone", 1, "signal 9"), ("gone", 7, "it left")]
    until = 3 + first[2:].index(("gone", 1, "signal 9"))  # b is told of itself, and of no more
    second = [seen_by_b.get(timeout=PATIENCE_S) for _ in range(until)]
    assert second == [("joined", 0, "a"), ("joined", 7, "c"), *first[2:]][:until]
    assert [each.name for each in a.all()] == ["a"]
    assert a.find(7) == c.me
    a.close()
    b.close()


def test_an_id_is_never_used_again() -> None:
    store = HashStore()
    first = Peers.join(store, peer("w", 3))
    first.close()
    again = Peers.join(store, peer("w", 3))
    assert again.own_id == 4
    assert Peers.join(store, peer("v")).own_id == 5
    assert [each.id for each in again.all()] == [4]  # has not looked since


def test_a_name_is_free_when_its_process_has_ended_and_not_before() -> None:
    store = HashStore()
    with pytest.raises(RendezvousError):
        Peers.join(store, peer("no name"))
    Peers.join(store, peer("w", process=ended()))
    second = Peers.join(store, peer("w"))
    assert second.own_id == 1
    assert [each.id for each in second.all()] == [1]
    with pytest.raises(RendezvousError) as caught:
        Peers.join(store, peer("w"))
    assert "is not unique" in str(caught.value)


def test_who_joins_is_told_of_those_that_are_gone() -> None:
    """Others may ask about them: what came from them has been read here, for nothing did."""
    store = HashStore()
    a = Peers.join(store, peer("a"))
    Peers.join(store, peer("b")).close()
    c = Peers.join(store, peer("c"))
    seen = told(c)
    assert [seen.get(timeout=PATIENCE_S) for _ in range(2)] == [
        ("gone", 1, "it left"),
        ("joined", 0, "a"),
    ]
    a.close()
    c.close()


def test_after_the_highest_id_the_lowest_free_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MOST_IDS", 4)
    store = HashStore()
    assert [Peers.join(store, peer(name, id)).own_id for name, id in [("a", 1), ("b", 3)]] == [1, 3]
    assert [Peers.join(store, peer(name)).own_id for name in "cd"] == [0, 2]
    with pytest.raises(RendezvousError, match="all ids were used"):
        Peers.join(store, peer("e"))


def test_memory_to_grant_a_request_does_not_grow_with_the_ids_that_exist() -> None:
    store = HashStore()
    Peers.join(store, peer("a"))
    b = Peers.join(store, peer("b"))
    tracemalloc.start()
    try:
        requests = [peers_module._Request(peer("c"), "token")]
        (granted,) = b._granted(requests[0], requests)
        assert tracemalloc.get_traced_memory()[1] < 64 << 10  # 65,536 numbers take 2 MiB
    finally:
        tracemalloc.stop()
    assert granted.peer.id == 2


class SpyStore(HashStore):
    """One process's handle on a shared store: counts requests, and may die before one of them."""

    def __init__(self, shared: HashStore, dies_at: str = "") -> None:
        super().__init__(timedelta(seconds=PATIENCE_S))
        self.shared, self.dies_at = shared, dies_at
        self.requests: Counter[str] = Counter()
        self.ended = threading.Event()

    def _answered(self, request: StoreRequest, patience_s: float) -> Reply | None:
        if self.dies_at and request.keys[0].startswith(self.dies_at):
            self.ended.set()
            raise StoreError("the process has died", op=request.op)
        self.requests[request.op] += 1
        return self.shared._answered(request, patience_s)


def test_a_process_joins_with_seven_requests_in_a_world_of_any_size() -> None:
    shared, costs = HashStore(), list[int]()
    for number in range(256):
        Peers.join(store := SpyStore(shared), peer(f"w{number}"))
        costs.append(store.requests.total())
    assert set(costs[1:]) == {7}
    assert costs[0] == 6  # there is nothing to read


def test_processes_that_join_at_once_share_events() -> None:
    """The first one writes the event for all requests."""
    store, at_once = HashStore(), 256
    lines = b"".join(
        peers_module._request_line(peers_module._Request(peer(f"w{number}"), str(number))) + b"\n"
        for number in range(at_once)
    )
    store.append("requests/0", lines)
    last = Peers.join(spy := SpyStore(store), peer("last"))
    assert spy.requests.total() == 6
    assert [each.name for each in last.all()] == ["last", *(f"w{n}" for n in range(at_once))]


def test_processes_that_join_at_once_each_send_few_requests() -> None:
    shared, at_once = HashStore(), 256
    stores = [SpyStore(shared) for _ in range(at_once)]
    gate = threading.Barrier(at_once)

    def join(number: int) -> None:
        gate.wait()
        Peers.join(stores[number], peer(f"w{number}"))

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(join, range(at_once)))
    assert sum(store.requests.total() for store in stores) < at_once * 64  # one by one: 256 each
    assert len(Peers.join(shared, peer("last")).all()) == at_once + 1


def test_a_process_finds_itself_in_an_event_of_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have requested; the second one's event is written first."""
    monkeypatch.setattr(peers_module, "_PATIENCE", timedelta(milliseconds=10))
    shared = HashStore()
    first = SpyStore(shared)
    joined: list[Peers] = []

    def before_first_writes(request: StoreRequest, patience_s: float) -> Reply | None:
        if request.op == "compare_set" and request.keys[0] == "event/0" and not joined:
            joined.append(Peers.join(shared, peer("second")))
        return shared._answered(request, patience_s)

    first._answered = before_first_writes
    a = Peers.join(first, peer("first"))
    assert (a.own_id, joined[0].own_id) == (1, 0)
    assert a.all() == joined[0].all()
    assert shared.check(["event/0"])
    assert not shared.check(["event/1"])


def test_a_name_that_two_request_at_once_is_granted_to_one() -> None:
    store = HashStore()

    def join(_: int) -> Peers | Exception:
        try:
            return Peers.join(store, peer("same"))
        except RendezvousError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(join, range(4)))
    assert sorted(type(each).__name__ for each in results) == ["Peers", *["RendezvousError"] * 3]


def test_a_process_that_dies_with_a_request_delays_no_other_and_keeps_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers_module, "_PATIENCE", timedelta(milliseconds=10))
    shared = HashStore()
    Peers.join(shared, peer("a"))
    with pytest.raises(StoreError):
        Peers.join(SpyStore(shared, dies_at="event/1"), peer("dead", process=ended()))
    b = Peers.join(spy := SpyStore(shared), peer("b"))
    assert spy.requests.total() == 7 + 1  # it waits for the process that requested before it
    assert [each.name for each in b.all()] == ["a", "b", "dead"]  # died just after it had joined
    c = Peers.join(shared, peer("dead"))
    assert [(each.id, each.name) for each in c.all()] == [(0, "a"), (1, "b"), (3, "dead")]


def test_writers_that_die_before_they_count_cost_one_process_four_requests_each() -> None:
    shared = HashStore()
    for number in range(4):
        Peers.join(shared, peer(f"w{number}"))
    a = Peers.join(shared, peer("a"))
    dying = SpyStore(shared)
    dead = Peers.join(dying, peer("dead"))
    dying.dies_at = "events"
    for id in range(3):
        dead._append(peers_module._Event(gone=id, how="signal 9"))
    b = Peers.join(spy := SpyStore(shared), peer("b"))
    assert spy.requests.total() == 7 + 3 * 4
    assert [each.id for each in b.all()] == [3, 4, 5, 6]
    c = Peers.join(after := SpyStore(shared), peer("c"))
    assert after.requests.total() == 7
    for each in (a, b, c):
        each.close()


def test_a_death_reaches_all_although_its_reporter_dies_after_one_request(
    request: pytest.FixtureRequest,
) -> None:
    shared = HashStore()
    watching = Peers.join(shared, peer("watching"))
    seen = told(watching)
    request.addfinalizer(watching.close)
    reporting = SpyStore(shared)
    reporter = Peers.join(reporting, peer("reporter"))
    victim = Peers.join(shared, peer("victim"))
    assert [seen.get(timeout=PATIENCE_S)[2] for _ in range(2)] == ["reporter", "victim"]
    reporter._read()
    reporting.dies_at = "events"
    reporter.give_up(victim.own_id, "signal 9")
    assert reporting.ended.wait(PATIENCE_S)
    assert shared.check(["event/3"])
    assert seen.get(timeout=PATIENCE_S) == ("gone", victim.own_id, "signal 9")
    later = Peers.join(shared, peer("later"))
    assert later._gone == {victim.own_id: "signal 9"}


@pytest.mark.parametrize("op", ["append", "add", "compare_set"])
@pytest.mark.parametrize("others_join", [True, False])
def test_a_process_that_is_interrupted_while_it_joins_is_not_in_the_world(
    op: str, others_join: bool
) -> None:
    """Its request is in the store, or is written there; another process may have granted it."""
    shared, first = HashStore(), HashStore()
    joined: list[Peers] = []

    def interrupted(request: StoreRequest, patience_s: float) -> Reply | None:
        key = "event/0" if op == "compare_set" else "requests/0"
        is_this = request.op == op and request.keys[0].startswith(key)
        if is_this and not interrupted_at:
            interrupted_at.append(request.op)
            shared._answered(request, patience_s)
            if others_join:
                joined.append(Peers.join(shared, peer("b")))
            raise KeyboardInterrupt
        return shared._answered(request, patience_s)

    interrupted_at: list[str] = []
    first._answered = interrupted
    with pytest.raises(KeyboardInterrupt):
        Peers.join(first, peer("a"))
    assert interrupted_at == [op]
    expected = ["b", "c"] if others_join else ["c"]
    assert [each.name for each in Peers.join(shared, peer("c")).all()] == expected
    again = Peers.join(shared, peer("a"))
    assert again.named("a") == again.me
