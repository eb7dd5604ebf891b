"""Who takes part: names, ids, who comes and who goes, as all of them see it."""

from __future__ import annotations

import queue
import subprocess
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from dure.errors import RendezvousError
from dure.rpc.peers import PeerAddress, Peers
from dure.store import HashStore
from dure.store.builds import Build, own_build
from dure.store.identity import Identity, myself, start_of
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
