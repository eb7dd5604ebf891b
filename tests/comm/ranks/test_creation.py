"""How groups come into being: keys that are removed, backends that are closed, and time limits."""

from __future__ import annotations

import gc
import statistics
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import dure as dist
from dure import native
from dure.comm import creation, init
from dure.comm.backends.base import BackendOptions
from dure.comm.backends.registry import register_backend, unregister_backend
from dure.comm.creation import GroupSpec, create_groups
from dure.comm.subgroups import GroupOptions, new_groups
from dure.comm.world import World, current_world
from dure.device_mesh import init_device_mesh
from dure.errors import Desync, PeerLost, RendezvousError, RendezvousTimeout, UsageError
from dure.store import HashStore, gathering
from dure.store.builds import Build, own_build
from dure.store.identity import myself
from dure.store.members import MemberTable, RendezvousMember
from dure.store.rendezvous import Rendezvous
from dure.testing import run_ranks
from dure.testing.ranks import new_world
from tests.store.conftest import dead_process
from tests.store.counting import CountingStore
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S, descriptors, until

FILE = Path(__file__).name
AT_ONCE, LONG = timedelta(microseconds=1), timedelta(seconds=PATIENCE_S)


def test_new_groups_that_disagree_raise_desync_with_both_lines():
    def body(rank):
        options = GroupOptions(backend=("threads", "cpu:threads")[rank])
        with pytest.raises(Desync) as caught:
            new_groups([[0, 1], [0, 1]], [options] * 2)
        return caught.value.calls

    said = run_ranks(2, body)[0]
    assert all(FILE in text for text in said.values())


def _keys() -> list[str]:
    joined = current_world().rendezvous
    assert joined is not None
    keys = [key.split("/") for key in joined.store.list_keys()]
    return [name for kind, name, *_ in keys if kind == "group" and name != "world"]


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@on_ranks(3)
def test_keys_of_groups_that_all_have_left_are_removed(rank, backend):
    before = _keys()
    dist.barrier()
    kept = dist.new_group([0, 1], backend=backend)
    gone = dist.new_group([1, 2], backend=backend)
    dist.barrier()
    if gone is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.monitored_barrier(gone)
        dist.destroy_process_group(gone)
    dist.barrier()
    assert kept is not None
    assert (before, set(_keys())) == ([], {"1"})


@on_ranks(3)
def test_groups_left_by_all_at_once_keep_nobody_and_no_keys(rank):
    for _ in range(30):
        group = dist.new_group([0, 1, 2])
        dist.destroy_process_group(group)
    dist.barrier()
    assert _keys() == []


@pytest.fixture
def half_built():
    """Two backends, of which the second cannot be made; yields how the first was closed."""
    closed = []

    class First:
        name, device_types = "first", frozenset({"cpu"})

        def close(self, abort):
            closed.append(abort)

    def fail(options):
        raise UsageError("cannot run here")

    first: Any = First  # only what the test needs of a backend
    register_backend("first", lambda options: first(), devices=("cpu",))
    register_backend("second", fail, devices=("cuda",))
    yield closed
    unregister_backend("first")
    unregister_backend("second")


def test_a_backend_is_closed_where_the_groups_other_one_cannot_be_made(half_built):
    def body(rank):
        with pytest.raises(UsageError):
            dist.new_group(backend="cpu:first,cuda:second")
        return dist.get_pg_count()

    assert run_ranks(1, body) == [1]
    assert half_built == [True]


# ---- groups of the plug-in, which has no group to compare calls in -------------------------------


def _refusals(
    error: type[Exception], prepare: Callable[[int], object], backends: tuple[str, str]
) -> list[str]:
    """Create a group on two ranks, which is refused; return what each of them has seen."""
    shared = HashStore()

    def create(rank: int) -> str:
        prepare(rank)
        spec = GroupSpec(name="g", global_ranks=(0, 1), backend=backends[rank], timeout=LONG)
        with pytest.raises(error) as caught:
            create_groups(World(), shared, rank, [spec])
        return getattr(caught.value, "seen", None) or ""

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(create, range(2)))


def test_ranks_of_the_plugin_with_different_builds_make_no_group(monkeypatch: pytest.MonkeyPatch):
    mine = threading.local()
    monkeypatch.setattr(creation, "own_build", lambda: Build(10, mine.version))

    def prepare(rank: int) -> None:
        mine.version = f"0.2.{rank}"

    for seen in _refusals(RendezvousError, prepare, ("gloo", "gloo")):
        assert "0.2.0 (protocol 10): rank 0 (pid " in seen
        assert "0.2.1 (protocol 10): rank 1 (pid " in seen


def test_members_that_chose_other_backends_because_one_has_no_engine_name_the_reason(
    monkeypatch: pytest.MonkeyPatch,
):
    mine = threading.local()
    monkeypatch.setattr(native, "available", lambda: (not mine.reason, mine.reason))

    def prepare(rank: int) -> None:
        mine.reason = "" if rank == 0 else "it is not built"

    for seen in _refusals(Desync, prepare, ("cpu:gloo", "gloo")):
        assert seen.endswith("; rank 1 has no native engine (it is not built)")


def test_sockets_of_gloo_close_with_a_group_that_was_not_made():
    before = descriptors()
    gc.disable()  # the errors that were raised are part of circles, the sockets must not be
    try:
        _refusals(Desync, lambda _: None, ("gloo", "cpu:gloo"))
        until(lambda: not descriptors() - before, "sockets to be closed")
    finally:
        gc.enable()


# ---- how long creation waits ---------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch):
    """Without a timeout of the program's, ranks that are late are not waited for at all."""
    for module in (creation, init):
        monkeypatch.setattr(module, "RENDEZVOUS_LIMIT", AT_ONCE)


MAKERS: dict[str, Callable[[], object]] = {
    "group": lambda: dist.new_group([0, 1], timeout=LONG),
    "own group": lambda: dist.new_group([0, 1], timeout=LONG, use_local_synchronization=True),
    "inheriting group": lambda: dist.new_group([0, 1]),
    "mesh": lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")),
    "split": lambda: dist.split_group(split_ranks=[[0, 1]]),
    "subgroups": lambda: dist.new_subgroups(2),
    "shrunk": dist.shrink,
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("hurried")
def test_creation_waits_as_long_as_the_program_said(make: str):
    waiting = threading.Event()

    def body(rank: int) -> None:
        if rank == 1:
            waiting.wait(0.05)  # rank 0 has come to wait by then, or the test proves less
        MAKERS[make]()
        waiting.set()

    run_ranks(2, body)


@pytest.mark.usefixtures("hurried")
def test_without_a_timeout_joining_waits_for_the_limit_alone():
    with new_world(), pytest.raises(RendezvousTimeout) as caught:
        dist.init_process_group("threads", store=dist.HashStore(), rank=0, world_size=2)
    assert caught.value.missing == (1,)


def test_a_group_may_be_waited_for_longer_than_an_operation_of_the_world():
    short = timedelta(milliseconds=1)
    waiting: list[dist.ProcessGroup] = []
    ended = threading.Event()

    def body(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        dist.barrier()
        group.set_timeout(short)
        if rank == 0:
            waiting.append(group)
        else:  # rank 0 waits by now, for the new group, or has given up
            until(lambda: ended.is_set() or (waiting and waiting[0].timeout == LONG))
            assert not ended.is_set(), "rank 0 has given up"
        try:
            dist.new_group(timeout=LONG)
        finally:
            ended.set()
        assert group.timeout == short
        group.set_timeout(LONG)
        dist.barrier()

    run_ranks(2, body)


def test_members_alone_that_pass_different_ranks_time_out_and_name_the_missing():
    def body(rank: int) -> tuple[int, ...]:
        ranks = [0, 1] if rank == 0 else [0, 1, 2]
        with pytest.raises(RendezvousTimeout) as info:
            dist.new_group(ranks, timeout=AT_ONCE, use_local_synchronization=True)
        return info.value.missing

    first, *others = run_ranks(3, body)
    assert first == (1,)
    assert all(0 in missing for missing in others)


# ---- what creation costs, and what its members learn of each other -------------------------------


def _world_of(members: list[RendezvousMember], store: HashStore) -> World:
    world = World()
    world.rendezvous = Rendezvous(
        store=store, rank=0, world_size=len(members), members=MemberTable.of(members)
    )
    return world


def _created_by(size: int) -> list[CountingStore]:
    """Let each rank create two groups, of all ranks and of a pair; return the ranks' stores."""
    shared = HashStore()
    stores = [CountingStore(shared) for _ in range(size)]
    member = RendezvousMember(0, size, myself(), "", own_build())
    all_ranks = [replace(member, rank=rank) for rank in range(size)]

    def create(rank: int) -> None:
        pair = rank - rank % 2
        specs = [
            GroupSpec(name="a", global_ranks=tuple(range(size)), backend="fake", timeout=LONG),
            GroupSpec(name=f"{pair}", global_ranks=(pair, pair + 1), backend="fake", timeout=LONG),
        ]
        create_groups(_world_of(all_ranks, shared), stores[rank], rank, specs)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(create, range(size)))
    return stores


def test_requests_and_bytes_of_a_rank_do_not_grow_with_a_group_of_256():
    few, many = _created_by(16), _created_by(256)
    for stores in (few, many):
        # It writes, counts itself twice, waits and reads; the last rank of a group reads the
        # entries and publishes.
        assert max(store.num_requests for store in stores) <= 5 + 2 * 2
    middle = [statistics.median(store.num_bytes for store in stores) for stores in (few, many)]
    # The entry lists the first and last ranks of a group of more than 64.
    assert middle[1] < middle[0] + 300


@pytest.mark.parametrize("swapped", [(1, 2), (40, 60)])
def test_members_that_pass_ranks_in_another_order_read_all_entries(swapped: tuple[int, int]):
    """Also if the ranks that differ are not among those that are listed."""
    size, shared = 100, HashStore()
    first, second = swapped

    def create(rank: int) -> dict[int, str]:
        ranks = list(range(size))
        if rank == 0:
            ranks[first], ranks[second] = second, first
        spec = GroupSpec(name="g", global_ranks=tuple(ranks), backend="fake", timeout=LONG)
        with pytest.raises(Desync) as caught:
            create_groups(World(), shared, rank, [spec])
        return caught.value.calls

    with ThreadPoolExecutor(size) as pool:
        calls, *others = pool.map(create, range(size))
    assert others == [calls] * (size - 1)
    told = [calls[rank].partition(" at ")[0] for rank in range(size)]
    assert told[0] != told[1]
    assert told[1:] == [told[1]] * (size - 1)
    assert told[1].startswith("new_group(ranks [0, 1, 2, ")
    assert ", 7, ..., 92, " in told[1]
    assert ", 99] (100 ranks, digest " in told[1]


def test_a_group_is_made_while_a_member_waits_for_another_group():
    shared = HashStore()

    def spec(name: str, *ranks: int) -> GroupSpec:
        return GroupSpec(name=name, global_ranks=ranks, backend="fake", timeout=LONG)

    with ThreadPoolExecutor(1) as pool:
        both = [spec("a", 0, 1), spec("b", 0, 2)]
        waits = pool.submit(create_groups, World(), shared, 0, both)
        (made,) = create_groups(World(), shared, 1, [spec("a", 0, 1)])
        assert made.size() == 2
        assert not waits.done()
        create_groups(World(), shared, 2, [spec("b", 0, 2)])
        assert len(waits.result()) == 2


def test_a_member_on_another_host_learns_of_a_process_that_has_ended():
    """Rank 0 sees that rank 1, on its host, has ended; rank 2 cannot, and waits for either."""
    shared, dead, here = HashStore(), dead_process(), myself()
    elsewhere = replace(here, host_id="elsewhere")
    members = [
        RendezvousMember(rank, 3, process, "", own_build())
        for rank, process in enumerate((here, dead, elsewhere))
    ]
    spec = GroupSpec(name="g", global_ranks=(0, 1, 2), backend="fake", timeout=LONG)

    def create(rank: int) -> tuple[int | None, int | None]:
        with pytest.raises(PeerLost) as caught:
            create_groups(_world_of(members, shared), shared, rank, [spec])
        return caught.value.peer, caught.value.pid

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(create, (0, 2))) == [(1, dead.pid)] * 2


@pytest.mark.parametrize("order", ["world first", "others first"])
def test_a_death_is_reported_to_all_groups_of_the_call_that_the_rank_is_in(order):
    """Ranks 0 and 1 see that rank 4 has ended; 2 is in one group with it, 3 in both."""
    shared, dead, here = HashStore(), dead_process(), myself()
    elsewhere = replace(here, host_id="elsewhere")
    processes = (here, here, elsewhere, elsewhere, dead)
    members = [RendezvousMember(r, 5, p, "", own_build()) for r, p in enumerate(processes)]
    world = GroupSpec(name="w", global_ranks=(0, 1, 2, 3, 4), backend="fake", timeout=LONG)
    others = GroupSpec(name="o", global_ranks=(0, 3, 4), backend="fake", timeout=LONG)
    specs = [world, others] if order == "world first" else [others, world]

    def create(rank: int) -> int | None:
        mine = [spec for spec in specs if rank in spec.global_ranks]
        with pytest.raises(PeerLost) as caught:
            create_groups(_world_of(members, shared), shared, rank, mine)
        return caught.value.pid

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(create, range(4))) == [dead.pid] * 4


def test_other_ranks_look_where_the_first_two_of_a_host_are_dead_or_late(monkeypatch):
    monkeypatch.setattr(creation, "_SELDOM_LOOK_S", 0.05)
    shared, dead, here = HashStore(), dead_process(), myself()
    processes = [replace(here, pid=pid) for pid in (1, here.pid, here.pid)]
    processes[0], processes[1] = dead, replace(here, start="late")
    monkeypatch.setattr(creation, "alive", lambda process: process != dead)
    members = [RendezvousMember(r, 3, p, "", own_build()) for r, p in enumerate(processes)]
    spec = GroupSpec(name="g", global_ranks=(0, 1, 2), backend="fake", timeout=LONG)
    with pytest.raises(PeerLost) as caught:
        create_groups(_world_of(members, shared), shared, 2, [spec])
    assert caught.value.peer == 0


# ---- failures in one group of a call, and the members of its other groups ------------------------


def _results(
    members: list[RendezvousMember], specs: list[GroupSpec], ranks: list[int]
) -> dict[int, BaseException]:
    """Create on each rank the groups that it is in, which fails; return the errors by rank."""
    shared, errors = HashStore(), dict[int, BaseException]()

    def create(rank: int) -> None:
        mine = [spec for spec in specs if rank in spec.global_ranks]
        with pytest.raises(dist.DureError) as caught:
            create_groups(_world_of(members, shared), shared, rank, mine)
        errors[rank] = caught.value

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(create, ranks))
    return errors


def _spec(name: str, *ranks: int, limit: timedelta = LONG) -> GroupSpec:
    return GroupSpec(name=name, global_ranks=ranks, backend="fake", timeout=limit)


def test_a_death_in_another_group_of_the_call_ends_the_wait_of_a_rank_that_is_not_in_it():
    """Rank 0 sees that rank 1 has ended; rank 2 shares with rank 0 a group without rank 1."""
    dead, here = dead_process(), myself()
    processes = (here, dead, replace(here, host_id="elsewhere"), here)
    members = [RendezvousMember(r, 4, p, "", own_build()) for r, p in enumerate(processes)]
    specs = [_spec("w", 0, 1), _spec("o", 0, 2, 3)]
    errors = _results(members, specs, [0, 2])
    assert isinstance(errors[0], PeerLost)
    assert isinstance(errors[2], RendezvousError)
    assert errors[2].peer == 0
    assert f"pid {dead.pid}" in errors[2].seen


def test_a_rank_that_is_late_in_another_group_of_the_call_ends_the_wait_at_once(monkeypatch):
    """Rank 3 does not come to w; rank 1 gives up; rank 0 is also in o, where rank 2 waits."""
    monkeypatch.setattr(gathering, "_LOOK_S", 0.05)
    member, shared = RendezvousMember(0, 5, myself(), "", own_build()), HashStore()
    members = [replace(member, rank=rank) for rank in range(5)]

    def create(rank: int, *specs: GroupSpec) -> BaseException:
        with pytest.raises(RendezvousError) as caught:
            create_groups(_world_of(members, shared), shared, rank, specs)
        return caught.value

    w, o = _spec("w", 0, 1, 3), _spec("o", 0, 2, 4)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(create, 0, w, o), pool.submit(create, 2, o)]
        until(lambda: shared.check(["group/w/0/member/0", "group/o/0/member/1"]))
        gives_up = create(1, _spec("w", 0, 1, 3, limit=AT_ONCE))
        first, second = (each.result(PATIENCE_S) for each in waits)
    for error in (gives_up, first):
        assert isinstance(error, RendezvousTimeout)
        assert (error.group, error.missing) == ("w", (2,))
    assert isinstance(second, RendezvousError)
    assert (second.group, second.peer) == ("o", 0)
    assert "missing are global ranks [3]" in second.seen


def test_a_rank_whose_backend_cannot_be_opened_is_not_waited_for(half_built):
    """Also if it fails before it has been counted."""

    def body(rank: int) -> BaseException:
        with pytest.raises(dist.DureError) as caught:
            dist.new_group(pg_options={"no such": 1} if rank == 1 else None)
        return caught.value

    first, second = run_ranks(2, body)
    assert isinstance(second, UsageError)
    assert isinstance(first, RendezvousError)
    assert first.peer == 1
    assert "UsageError" in first.seen


def test_a_second_group_of_a_name_in_one_store_has_keys_of_its_own():
    """As groups of the plug-in, whose processes leave a world and begin another in its store."""
    shared = HashStore()

    def create(rank: int) -> bool:
        spec = GroupSpec(name="g", global_ranks=(0, 1), backend="gloo", timeout=LONG)
        (group,) = create_groups(World(), shared, rank, [spec])
        found = group.store.check(["mine"])
        group.store.set("mine", b"")
        group.close()
        return found

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            assert False in pool.map(create, range(2))  # the first one to ask finds nothing


def test_the_last_of_256_ranks_to_leave_removes_the_keys_in_one_request():
    """It leaves, lists the keys and removes them; the others only leave."""
    shared, size = HashStore(), 256
    stores = [CountingStore(shared) for _ in range(size)]
    member = RendezvousMember(0, size, myself(), "", own_build())
    world = _world_of([replace(member, rank=rank) for rank in range(size)], shared)
    joined = world.rendezvous
    assert joined is not None
    spec = GroupSpec(name="a", global_ranks=tuple(range(size)), backend="fake", timeout=LONG)
    with ThreadPoolExecutor(size) as pool:
        make = lambda r: create_groups(world, stores[r], r, [spec])[0]  # noqa: E731
        groups = list(pool.map(make, range(size)))
    before = [store.num_requests for store in stores]
    for group in groups:
        creation.forget_keys(group, joined)
    after = [store.num_requests for store in stores]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1] * (size - 1) + [3]
    assert shared.list_keys() == []


@pytest.fixture
def waiting_backend():
    """A backend whose ranks wait in the group's store for rank 0 to connect."""

    def connect(options: BackendOptions) -> Any:
        options.store.wait(["rank 0 has connected"], LONG)

    register_backend("waiting", connect, devices=("cpu",))
    yield
    unregister_backend("waiting")


@pytest.mark.usefixtures("waiting_backend")
def test_a_rank_that_fails_when_all_have_come_is_not_waited_for_by_its_other_group():
    """Ranks 0 and 1 do not agree on w; rank 2 waits for rank 0 in o, which is complete."""
    member, shared = RendezvousMember(0, 3, myself(), "", own_build()), HashStore()
    members = [replace(member, rank=rank) for rank in range(3)]

    def create(rank: int) -> BaseException:
        specs = [
            GroupSpec(name="w", global_ranks=(0, 1), backend=f"{'cpu:' * rank}fake", timeout=LONG),
            GroupSpec(name="o", global_ranks=(0, 2), backend="waiting", timeout=LONG),
        ]
        mine = [spec for spec in specs if rank in spec.global_ranks]
        with pytest.raises(dist.DureError) as caught:
            create_groups(_world_of(members, shared), shared, rank, mine)
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(create, rank) for rank in (0, 2)]
        until(lambda: shared.check(["group/o/0/verdict", "group/w/0/member/0"]))
        second = create(1)
        first, third = (each.result(PATIENCE_S) for each in waits)
    assert isinstance(first, Desync)
    assert isinstance(second, Desync)
    assert isinstance(third, RendezvousError)
    assert (third.group, third.peer) == ("o", 0)
    assert third.seen.startswith("global rank 0: Desync: the members do not agree on the group")


def test_a_rank_whose_group_does_not_agree_does_not_wait_for_its_other_group(monkeypatch):
    """Rank 2 does not come to o."""
    monkeypatch.setattr(gathering, "_LOOK_S", 0.05)
    member, shared = RendezvousMember(0, 3, myself(), "", own_build()), HashStore()
    members = [replace(member, rank=rank) for rank in range(3)]

    def create(rank: int) -> None:
        limit = LONG if rank == 0 else AT_ONCE
        specs = [
            GroupSpec(name="w", global_ranks=(0, 1), backend=f"{'cpu:' * rank}fake", timeout=limit),
            GroupSpec(name="o", global_ranks=(0, 2), backend="fake", timeout=limit),
        ]
        mine = [spec for spec in specs if rank in spec.global_ranks]
        with pytest.raises(Desync):
            create_groups(_world_of(members, shared), shared, rank, mine)

    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(create, 0)
        until(lambda: shared.check(["group/w/0/member/0"]))
        create(1)
        waits.result(PATIENCE_S)
