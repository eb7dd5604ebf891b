"""What ranks know of each other by what is written in a store; the others are only written."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from dure.elastic.registry import Registry, has_begun
from dure.elastic.roster import Here, Member, Plan
from dure.store import HashStore
from dure.store.identity import Identity, myself

ME = myself()
DEAD = msgspec.structs.replace(ME, start="never")
FAR = Identity(1, "1", "elsewhere", "another host")

MINE, FIRST, LATER, GONE = (
    Member("mine", 0, ME),
    Member("first", 1, FAR),
    Member("later", 2, FAR),
    Member("gone", 3, DEAD),
)
LAST = Plan(number=4, members=(MINE, FIRST, LATER, GONE), known=("mine", "first", "later", "gone"))
NONE = timedelta(0)


def nobody(rank: int) -> bool:
    return False


def everybody(rank: int) -> bool:
    return True


def tokens(members: list[Member]) -> list[str]:
    return [m.token for m in members]


def left(store: HashStore) -> list[str]:
    return store.get("left").decode().split()


def test_an_empty_store_has_no_epoch_and_nobody_waits():
    registry = Registry(HashStore())
    assert registry.latest() == -1
    assert registry.plan(0, NONE) is None
    assert not registry.finished()
    assert not registry.waiting(LAST)
    assert registry.newcomers(None) == []


def test_the_first_plan_that_is_proposed_counts_and_newcomers_are_told_its_number():
    store = HashStore()
    registry, other = Registry(store), Registry(store)
    registry.propose(LAST)
    other.propose(msgspec.structs.replace(LAST, members=()))
    assert registry.plan(4, NONE) == other.plan(4, NONE) == LAST
    assert registry.latest() == 4


@pytest.mark.parametrize(("there", "at"), [(None, 4), (3, 4), (4, 4), (6, 6)])
def test_another_store_learns_the_latest_epoch_and_who_has_ended(there: int | None, at: int):
    registry, store = Registry(HashStore()), HashStore()
    assert registry.has_ended(GONE)
    if there is not None:
        Registry(store).propose(msgspec.structs.replace(LAST, number=there))
    registry.move(store, LAST)
    assert registry.store is store
    assert registry.latest() == at
    assert registry.plan(4, NONE) == LAST
    assert left(store) == ["gone"]


def test_the_end_of_the_job_is_told_to_all():
    store = HashStore()
    Registry(store).finish()
    assert Registry(store).finished()


def test_who_comes_waits_until_it_is_known_or_has_ended():
    store = HashStore()
    registry = Registry(store)
    for member in (FIRST, MINE, GONE):
        registry.come(member)
    assert tokens(registry.newcomers(None)) == ["first", "mine"], "in the order in which they came"
    plan = Plan(number=0, members=(FIRST,), known=("first",))
    assert registry.waiting(plan)
    assert tokens(registry.newcomers(plan)) == ["mine"]
    registry.leave(MINE)
    assert not registry.waiting(plan)
    assert Registry(store).newcomers(plan) == []


def test_a_rank_that_comes_again_ends_those_that_had_it_before():
    registry = Registry(HashStore())
    for token in ("one", "two", "three"):
        registry.come(Member(token, 5, FAR))
    registry.come(Member("other", 6, FAR))
    assert tokens(registry.newcomers(None)) == ["three", "other"]
    registry.come(Member("four", 6, FAR))
    assert tokens(registry.newcomers(None)) == ["three", "four"]


def test_who_sees_a_process_end_says_goodbye_for_it_once():
    store = HashStore()
    registry = Registry(store)
    assert [registry.has_ended(m) for m in (GONE, GONE, MINE, FIRST)] == [True, True, False, False]
    assert left(store) == ["gone"]


def test_survivors_are_members_that_are_here_in_their_order_with_what_they_have():
    registry = Registry(HashStore())
    assert registry.survivors(LAST) == []
    for member, here in ((LATER, Here(2)), (MINE, Here(1, 2)), (GONE, Here(3))):
        registry.announce(5, member, here)
    assert registry.survivors(LAST) == [(MINE, Here(1, 2)), (LATER, Here(2))]
    registry.leave(LATER)
    assert registry.survivors(LAST) == [(MINE, Here(1, 2))]


def test_an_announcement_is_of_one_epoch():
    store = HashStore()
    registry = Registry(store)
    registry.announce(5, MINE, Here())
    assert [has_begun(store, number) for number in (4, 5, 6)] == [False, True, False]
    assert registry.survivors(msgspec.structs.replace(LAST, number=5)) == []


def test_missing_is_who_lives_and_is_not_here():
    registry = Registry(HashStore())
    assert tokens(registry.missing(LAST, nobody)) == ["mine", "first", "later"]
    registry.announce(5, LATER, Here())
    assert tokens(registry.missing(LAST, nobody)) == ["mine", "first"]
    assert tokens(registry.missing(LAST, everybody)) == ["mine"], "the kernel knows that it lives"
    assert tokens(registry.missing(LAST, lambda rank: rank == 2)) == ["mine", "first"]
    registry.announce(5, MINE, Here())
    assert tokens(registry.missing(LAST, nobody)) == ["first"]
    assert registry.missing(LAST, lambda rank: rank == 1) == []
    registry.leave(FIRST)
    assert registry.missing(LAST, nobody) == []


def test_who_is_merely_silent_has_not_ended():
    registry = Registry(HashStore())
    assert registry.ended(LAST, nobody, nobody) == {"gone"}
    assert registry.ended(LAST, everybody, nobody) == {"first", "later", "gone"}
    assert registry.ended(LAST, everybody, everybody) == {"gone"}
    assert registry.ended(LAST, everybody, lambda rank: rank == 1) == {"later", "gone"}
    assert registry.ended(LAST, lambda rank: rank == 1, nobody) == {"first", "gone"}
