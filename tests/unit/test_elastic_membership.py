"""How a process comes to a view: a store in this process, and peers that are only written there."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from dure.elastic.member_table import MemberTable
from dure.elastic.membership import JobDone, Membership
from dure.elastic.views import Member, Progress, View
from dure.errors import Aborted, PeerLost, RendezvousError, StoreTimeout
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
LAST = View(number=4, members=(MINE, FIRST, LATER, GONE), known=("mine", "first", "later", "gone"))
NONE = timedelta(0)


def nobody(rank: int) -> bool:
    return False


def everybody(rank: int) -> bool:
    return True


def tokens(members: list[Member]) -> list[str]:
    return [m.token for m in members]


def left(store: HashStore) -> list[str]:
    return store.get("left").decode().split()


# ---- the table ---------------------------------------------------------------------------------


def test_an_empty_table_has_no_view_and_nobody_waits():
    table = MemberTable(HashStore())
    assert table.latest() == -1
    assert table.view(0, NONE) is None
    assert not table.finished()
    assert not table.waiting(LAST)
    assert table.newcomers(None) == []


def test_the_first_view_that_is_proposed_counts_and_newcomers_are_told_its_number():
    store = HashStore()
    table, other = MemberTable(store), MemberTable(store)
    table.propose(LAST)
    other.propose(msgspec.structs.replace(LAST, members=()))
    assert table.view(4, NONE) == other.view(4, NONE) == LAST
    assert table.latest() == 4


def test_who_comes_waits_until_it_is_known_or_has_ended():
    store = HashStore()
    table = MemberTable(store)
    for member in (FIRST, MINE, GONE, FIRST):  # the answer to the first was lost
        table.come(member)
    assert tokens(table.newcomers(None)) == ["first", "mine"], "in the order in which they came"
    view = View(number=0, members=(FIRST,), known=("first",))
    assert table.waiting(view)
    assert tokens(table.newcomers(view)) == ["mine"]
    table.leave(MINE)
    assert not table.waiting(view)
    assert MemberTable(store).newcomers(view) == []


def test_a_rank_that_comes_again_ends_those_that_had_it_before():
    table = MemberTable(HashStore())
    for token, rank in (("one", 5), ("two", 5), ("other", 6)):
        table.come(Member(token, rank, FAR))
    assert tokens(table.newcomers(None)) == ["two", "other"]


def test_who_sees_a_process_of_its_host_end_says_goodbye_for_it_once():
    store = HashStore()
    table = MemberTable(store)
    assert [table.has_ended(m) for m in (GONE, GONE, MINE, FIRST)] == [True, True, False, False]
    assert left(store) == ["gone"]


def test_survivors_are_members_that_are_here_in_their_order_with_what_they_have():
    store = HashStore()
    table = MemberTable(store)
    assert table.survivors(LAST) == []
    for member, at in ((LATER, Progress(2)), (MINE, Progress(1, 2)), (GONE, Progress(3))):
        table.announce(5, member, at)
    assert table.survivors(LAST) == [(MINE, Progress(1, 2)), (LATER, Progress(2))]
    assert [table.begun(number) for number in (4, 5, 6)] == [False, True, False]
    assert table.survivors(msgspec.structs.replace(LAST, number=5)) == []


def test_missing_is_who_lives_and_is_not_here():
    table = MemberTable(HashStore())
    assert tokens(table.missing(LAST, nobody)) == ["mine", "first", "later"]
    table.announce(5, LATER, Progress())
    assert tokens(table.missing(LAST, everybody)) == ["mine"], "the kernel knows that it lives"
    assert tokens(table.missing(LAST, lambda rank: rank == 2)) == ["mine", "first"]
    table.announce(5, MINE, Progress())
    assert table.missing(LAST, lambda rank: rank == 1) == []
    table.leave(FIRST)
    assert table.missing(LAST, nobody) == []


# ---- the agreement -----------------------------------------------------------------------------


def test_a_newcomer_does_not_wait_for_ever_for_ranks_of_hosts_that_may_be_lost():
    store = HashStore()
    MemberTable(store).propose(View(number=0, members=(FIRST,), known=("first",)))
    with pytest.raises(RendezvousError) as caught:
        Membership(store, 1, 2, timeout_s=0.2).enter()
    assert (caught.value.rank, caught.value.elapsed_s) == (1, 0.2)


def test_a_newcomer_whose_job_is_done_or_who_shall_end_is_told_so():
    store = HashStore()
    MemberTable(store).propose(View(number=0, members=(MINE,), known=("mine",)))
    with pytest.raises(JobDone):
        Membership(store, 1, 2, give_up=lambda: True).enter()
    MemberTable(store).finish()
    with pytest.raises(JobDone):
        Membership(store, 1, 2).enter()


def test_survivors_go_on_with_a_rank_that_has_come_again_after_those_that_are_left():
    store = HashStore()
    here = Membership(store, 1, 2)
    last = View(number=0, members=(FIRST, here.me), known=("first", here.me.token))
    for token in ("first", "again"):  # the launcher has started the rank once more
        here.table.come(Member(token, FIRST.rank, FAR))
    here.announce(last, Progress(committed=5))
    view = here.agree(last, nobody)
    assert tokens([*view.members]) == [here.me.token, "again"]
    assert (view.step, view.source, view.behind) == (5, 0, (1,))


def test_a_member_of_another_host_that_lives_and_does_not_come_is_left_out_in_the_end():
    here = Membership(HashStore(), 0, 2, timeout_s=0.05)
    last = View(number=0, members=(here.me, FIRST), known=(here.me.token, "first"))
    here.announce(last, Progress(committed=5))
    assert here.agree(last, nobody).members == (here.me,)


def test_who_was_left_out_comes_back_as_a_newcomer():
    store = HashStore()
    late = Membership(store, 0, 1, enough_s=0.0)
    last = View(number=0, members=(late.me, FIRST), known=(late.me.token, "first"))
    after = View(number=1, members=(GONE,), known=(late.me.token, "first", "gone"))
    late.table.propose(after)  # whose only member has ended since
    late.announce(last, Progress(committed=5))
    view = late.agree(last, nobody)
    assert (view.number, view.members, view.source) == (2, (late.me,), -1)
    assert late.me.token not in last.known


def test_waiting_for_a_group_ends_when_a_member_has_ended_or_given_up():
    here = Membership(HashStore(), 0, 2, timeout_s=0.05)
    with pytest.raises(PeerLost) as lost:
        here.keys_of(LAST).get("address")
    assert lost.value.peer == 3
    alive = View(number=4, members=(MINE, FIRST))
    with pytest.raises(StoreTimeout):
        here.keys_of(alive).get("address")
    here.announce(alive, Progress())
    with pytest.raises(Aborted):
        here.keys_of(alive).multi_get(["address"])
