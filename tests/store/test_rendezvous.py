"""Meetings, with ranks as threads: who meets, and what each mistake becomes on every rank."""

import contextlib
import os
import socket
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from dure.errors import RendezvousError, RendezvousTimeout
from dure.store import FileStore, HashStore, PrefixStore
from dure.store import rendezvous as module
from dure.store.builds import Build, own_build
from dure.store.identity import myself
from dure.store.rendezvous import Rendezvous, RendezvousMember, rendezvous
from dure.store.wire import Reply, StoreRequest
from tests.waiting import until

from .conftest import TIMEOUT, dead_process
from .counting import CountingStore

BRIEF = timedelta(milliseconds=100)


def each(*calls: Callable[[], Rendezvous]) -> list[Rendezvous | RendezvousError]:
    """Make all calls at once; return what each returned or raised."""

    def guarded(call: Callable[[], Rendezvous]) -> Rendezvous | RendezvousError:
        try:
            return call()
        except RendezvousError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(guarded, calls))


def joins(url: str, *numbers: tuple[int, int], timeout: timedelta = TIMEOUT):
    def join(rank: int, world_size: int) -> Callable[[], Rendezvous]:
        return lambda: rendezvous(url, rank, world_size, timeout=timeout)

    return each(*(join(*number) for number in numbers))


Ended = list[Rendezvous | RendezvousError]


def met(results: Ended) -> list[Rendezvous]:
    assert all(isinstance(result, Rendezvous) for result in results), results
    return [result for result in results if isinstance(result, Rendezvous)]


def errors_of(results: Ended) -> list[RendezvousError]:
    assert all(isinstance(result, RendezvousError) for result in results), results
    return [result for result in results if isinstance(result, RendezvousError)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_meet_and_share_keys(url: str, world_size: int) -> None:
    ranks = met(joins(url, *((rank, world_size) for rank in range(world_size))))
    for rank, meeting in enumerate(ranks):
        assert (meeting.rank, meeting.world_size) == (rank, world_size)
        assert [member.rank for member in meeting.members] == list(range(world_size))
        assert meeting.members[0].pid == os.getpid()
        assert meeting.same_host
        assert meeting.same_process
        assert meeting.local_world_size == world_size
        assert meeting.store.timeout == TIMEOUT
        meeting.store.set(f"from {rank}", str(rank))
    for meeting in ranks:
        assert meeting.store.get(f"from {world_size - 1}") == str(world_size - 1).encode()
        meeting.close()
        meeting.close()


def test_two_with_one_number_are_both_named_to_everybody(url: str) -> None:
    errors = errors_of(joins(url, (0, 4), (1, 4), (1, 4), (2, 4)))
    for error in errors:
        assert not isinstance(error, TimeoutError)
        assert error.seen.count(f"pid {os.getpid()}") == 2


def test_a_late_rank_learns_of_a_mistake_from_a_file_that_the_others_have_closed(
    tmp_path: Path,
) -> None:
    url = f"file://{tmp_path}/meeting"
    first = errors_of(joins(url, (1, 3), (1, 3)))
    assert {error.what for error in errors_of(joins(url, (0, 3)))} == {first[0].what}


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-2, 2), (0, 0), (0, -5)])
def test_numbers_that_cannot_be_are_refused(rank: int, world_size: int) -> None:
    with pytest.raises(RendezvousError) as caught:
        rendezvous(rank=rank, world_size=world_size, store=HashStore())
    assert f"RANK={rank}" in caught.value.seen


@pytest.mark.parametrize("world_size", [3, 4])  # the fourth never comes, and is not waited for
def test_ranks_of_different_builds_are_refused_at_once_with_all_builds_named(
    url: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = threading.local()
    monkeypatch.setattr(module, "own_build", lambda: mine.build)

    def join(rank: int, build: Build) -> Callable[[], Rendezvous]:
        def call() -> Rendezvous:
            mine.build = build
            return rendezvous(url, rank, world_size, timeout=TIMEOUT)

        return call

    old, new = Build(10, "0.2.0.dev20261128+g5d4b20e5"), Build(10, "0.2.0.dev20261128+g1a2b3c4d")
    errors = errors_of(each(join(0, old), join(1, new), join(2, old)))
    assert {error.what for error in errors} == {"the ranks run different builds of Dure"}
    for error in errors:
        assert error.seen is not None
        for build in (old, new):
            assert f"{build.version} (protocol 10): rank " in error.seen
        assert myself().host in error.seen


def test_ranks_that_disagree_on_the_world_size_learn_who_says_what(url: str) -> None:
    errors = errors_of(joins(url, (0, 2), (1, 3)))
    for error in errors:
        assert not isinstance(error, TimeoutError)
        assert "2 says rank 0" in error.seen
        assert "3 says rank 1" in error.seen
    for meeting in met(joins(url, (0, 2), (1, 2))):  # they can meet after that
        meeting.close()


def test_a_complete_meeting_refuses_one_of_another_size(url: str) -> None:
    meetings = met(joins(url, (0, 2), (1, 2)))
    (error,) = errors_of(joins(url, (2, 3)))
    assert not isinstance(error, TimeoutError)
    for meeting in meetings:
        meeting.close()


def test_a_missing_rank_is_named_with_those_who_came() -> None:
    store = HashStore(TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(each, lambda: rendezvous(rank=2, world_size=4, store=store))
        store.wait(["dure/store//0/member/2"])
        hasty = each(lambda: rendezvous(rank=0, world_size=4, store=store, timeout=BRIEF))
        errors = errors_of(hasty + waits.result())
    for error in errors:
        assert isinstance(error, RendezvousTimeout)
        assert error.came == (0, 2)
        assert error.missing == (1, 3)
        assert f"pid {os.getpid()}" in error.seen


def test_ranks_that_wait_for_a_missing_one_do_not_all_read_all_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks look who has come; the others have one request each, which waits."""
    monkeypatch.setattr(module, "_WATCH_S", 0.01)  # so that they look often
    world_size = 16
    shared = HashStore(TIMEOUT)
    stores = [CountingStore(shared) for _ in range(world_size - 1)]
    keys = PrefixStore("dure/store/", shared)

    def join(rank: int) -> Callable[[], Rendezvous]:
        return lambda: rendezvous(None, rank, world_size, stores[rank], TIMEOUT)

    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(each, *(join(rank) for rank in range(world_size - 1)))
        until(lambda: keys.check(["0/count"]) and keys.get("0/count") == b"15", "all but one rank")
        until(lambda: sum(store.num_requests > 30 for store in stores) >= 2, "ten looks of two")
        assert sum(store.num_requests > 8 for store in stores) == 2
        met([rendezvous(None, world_size - 1, world_size, shared, TIMEOUT)])
        met(waits.result())


def stores_of_meeting(world_size: int) -> list[CountingStore]:
    shared = HashStore(TIMEOUT)
    stores = [CountingStore(shared) for _ in range(world_size)]

    def join(rank: int) -> Callable[[], Rendezvous]:
        return lambda: rendezvous(None, rank, world_size, stores[rank], TIMEOUT)

    met(each(*map(join, range(world_size))))
    return stores


def test_requests_and_bytes_of_a_rank_do_not_grow_with_256_ranks_of_one_process() -> None:
    few, many = stores_of_meeting(16), stores_of_meeting(256)
    for stores in (few, many):
        # Generation, member, world size, count, a wait and the outcome. The last rank reads all
        # members and writes the outcome; the first two may have looked who has come.
        assert sorted(store.num_requests for store in stores)[: len(stores) - 2] == [6] * (
            len(stores) - 2
        )
    middle = [statistics.median(store.num_bytes for store in stores) for stores in (few, many)]
    # A number per rank, its process, is in the table, and is compressed.
    assert middle[1] < middle[0] + 256


def test_ranks_that_watch_read_each_member_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WATCH_S", 0.01)
    world_size = 64
    shared = HashStore(TIMEOUT)
    watcher, keys = CountingStore(shared), PrefixStore("dure/store/", shared)
    members = [f"dure/store//0/member/{rank}" for rank in range(world_size - 1)]
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as pool:
        waits = first.submit(rendezvous, None, 0, world_size, watcher, TIMEOUT)
        until(lambda: keys.check(["0/count"]), "the watcher to be the first")
        others = [
            lambda r=r: rendezvous(None, r, world_size, shared, TIMEOUT)
            for r in range(1, world_size - 1)
        ]
        all_but_one = pool.submit(each, *others)
        until(lambda: all(watcher.num_gets[key] for key in members), "the watcher to read all")
        asked = watcher.num_requests
        until(lambda: watcher.num_requests > asked + 20, "more looks")
        assert {key: watcher.num_gets[key] for key in members} == dict.fromkeys(members, 1)
        met([rendezvous(None, world_size - 1, world_size, shared, TIMEOUT)])
        met([waits.result(), *all_but_one.result()])


def test_group_names_set_meetings_in_one_store_apart() -> None:
    store = HashStore()
    first = rendezvous(rank=0, world_size=1, store=store, group_name="a")
    second = rendezvous(rank=0, world_size=1, store=store, group_name="b")
    first.store.set("k", "v")
    assert not second.store.check(["k"])


def test_a_missing_rank_0_is_named(port: int) -> None:
    (error,) = errors_of(joins(f"tcp://127.0.0.1:{port}", (1, 2), timeout=BRIEF))
    assert isinstance(error, RendezvousTimeout)
    assert error.missing == (0,)
    assert f"127.0.0.1:{port}" in error.what


@pytest.mark.parametrize("closed", [(0, 1), (0,), ()])
def test_a_file_of_a_job_whose_ranks_closed_it_or_died_is_used_again_without_its_keys(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    path, dead = tmp_path / "meeting", [dead_process(), dead_process()]
    with contextlib.closing(FileStore(path)) as left:
        for rank in range(2):
            member = RendezvousMember(rank, 2, dead[rank], "x", own_build())
            left.set(f"dure/file//0/member/{rank}", msgspec.msgpack.encode(member))
        for rank in closed:
            left.set(f"dure/file//next/{rank}", "1")
    lines = [[None, process] for process in dead]
    lines += [[None, dead[rank], True] for rank in closed]
    with path.open("ab") as file:
        file.write(msgspec.json.Encoder().encode_lines(lines))
    for meeting in met(joins(f"file://{path}", (0, 2), (1, 2))):
        meeting.close()
    assert not path.exists()


def test_a_number_whose_holder_died_is_an_error() -> None:
    store, dead = HashStore(), dead_process()
    held = rendezvous(rank=0, world_size=1, store=store)
    member = msgspec.structs.replace(held.members[0], process=dead, token="x")
    store.set("dure/store//0/member/0", msgspec.msgpack.encode(member))
    with pytest.raises(RendezvousError) as caught:
        rendezvous(rank=0, world_size=1, store=store)
    assert f"pid {dead.pid}" in caught.value.seen


def test_who_has_left_makes_room_for_another_process() -> None:
    store, key = HashStore(), "dure/store//0/member/0"
    meeting = rendezvous(rank=0, world_size=1, store=store)
    meeting.close()
    elsewhere = msgspec.structs.replace(myself(), host_id="elsewhere")
    member = msgspec.structs.replace(meeting.members[0], process=elsewhere)
    store.set(key, msgspec.msgpack.encode(member))
    rendezvous(rank=0, world_size=1, store=store).close()


def test_a_given_store_is_used_twice_and_stays_open() -> None:
    store = HashStore(TIMEOUT)
    for _ in range(2):
        meetings = met(
            each(*(lambda r=r: rendezvous(rank=r, world_size=2, store=store) for r in range(2)))
        )
        for meeting in meetings:
            meeting.close()
    store.set("still", "open")


@pytest.mark.parametrize("local", [2, 1])
def test_under_torchrun_the_agents_port_stays_the_agents(
    monkeypatch: pytest.MonkeyPatch, local: int, port: int
) -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a server of another test is as good
            stack.enter_context(socket.create_server(("127.0.0.1", port - 1)))
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port - 1}  # the store's is reserved
        told |= {"LOCAL_WORLD_SIZE": local, "TORCHELASTIC_USE_AGENT_STORE": True}
        for name, value in told.items():
            monkeypatch.setenv(name, str(value))
        for meeting in met(joins("env://", (0, 2), (1, 2))):
            meeting.close()


def _claimed_only(store: HashStore, rank: int, world_size: int) -> None:
    """Claim a number as a process of another host that ends before it is counted."""
    elsewhere = msgspec.structs.replace(myself(), host="far", host_id="elsewhere")
    member = RendezvousMember(rank, world_size, elsewhere, "x", own_build())
    store.set(f"dure/store//0/member/{rank}", msgspec.msgpack.encode(member))


def test_a_rank_that_ends_between_its_claim_and_its_count_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.3)
    store = HashStore(TIMEOUT)
    _claimed_only(store, 2, 5)
    calls = [
        lambda r=r: rendezvous(rank=r, world_size=5, store=store, timeout=BRIEF)
        for r in (0, 1, 3, 4)
    ]
    for error in errors_of(each(*calls)):
        assert isinstance(error, RendezvousTimeout)
        assert (error.came, error.missing) == ((0, 1, 3, 4), (2,))
        assert "only 4 of 5 ranks" in error.what


def test_ranks_meet_if_one_is_counted_after_the_limit_of_the_others() -> None:
    """It had claimed its number before: it answers the roll call."""
    shared = HashStore(TIMEOUT)
    slow = HashStore(TIMEOUT)

    def answered(request: StoreRequest, patience_s: float) -> Reply | None:
        if request.op == "add" and request.keys[0].endswith("0/count"):
            until(lambda: shared.check(["dure/store//0/outcome"]))
        return shared._answered(request, patience_s)

    slow._answered = answered
    stores, limits = [shared, shared, slow], [BRIEF, BRIEF, TIMEOUT]
    calls = [
        lambda r=r: rendezvous(rank=r, world_size=3, store=stores[r], timeout=limits[r])
        for r in range(3)
    ]
    met(each(*calls))
