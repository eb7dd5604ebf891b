"""How a process comes to a view: a store in this process, and peers that are only written there."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from dure.elastic.membership import JobDone, RankMembership
from dure.elastic.views import ElasticView, Progress, RankMember
from dure.errors import Aborted, PeerLost, RendezvousError, StoreTimeout
from dure.store import HashStore
from dure.store.identity import Identity, myself
from tests.waiting import PATIENCE_S

ME = myself()
DEAD = msgspec.structs.replace(ME, start="never")
FAR = Identity(1, "1", "elsewhere", "another host")

MINE, FIRST, LATER, GONE = (
    RankMember("mine", 0, ME),
    RankMember("first", 1, FAR),
    RankMember("later", 2, FAR),
    RankMember("gone", 3, DEAD),
)
LAST = ElasticView(
    number=4, members=(MINE, FIRST, LATER, GONE), known=("mine", "first", "later", "gone")
)


def nobody(rank: int) -> bool:
    return False


def everybody(rank: int) -> bool:
    return True


def tokens(members: list[RankMember]) -> list[str]:
    return [m.token for m in members]


NOTHING = Progress()


def says_here(store: HashStore, member: RankMember, progress: Progress = NOTHING) -> None:
    """Let a member announce that LAST has ended."""
    other = RankMembership(store, member.rank, 4)
    other.me = member
    other.announce(LAST, progress)


def one_of(store: HashStore, **options: Any) -> RankMembership:
    return RankMembership(store, 0, 2, **options)


def test_who_comes_waits_until_it_is_known_or_has_ended():
    store = HashStore()
    here = one_of(store)
    assert here.newcomers(None) == []
    for member in (FIRST, MINE, GONE, FIRST):  # the answer to the first was lost
        here.register(member)
    assert tokens(here.newcomers(None)) == ["first", "mine"], "in the order in which they came"
    view = ElasticView(number=0, members=(FIRST,), known=("first",))
    assert tokens(here.newcomers(view)) == ["mine"]
    here.leave(MINE)
    assert here.newcomers(view) == one_of(store).newcomers(view) == []


def test_a_rank_that_comes_again_ends_those_that_had_it_before():
    here = one_of(HashStore())
    for token, rank in (("one", 5), ("two", 5), ("other", 6)):
        here.register(RankMember(token, rank, FAR))
    assert tokens(here.newcomers(None)) == ["two", "other"]


def test_who_sees_a_process_of_its_host_end_says_goodbye_for_it_once():
    store = HashStore()
    here = one_of(store)
    assert [here.has_ended(m) for m in (GONE, GONE, MINE, FIRST)] == [True, True, False, False]
    assert store.get("left").split() == [b"gone"]


def test_missing_is_who_lives_and_is_not_here():
    store = HashStore()
    here = one_of(store)
    assert tokens(here.missing(LAST, nobody)) == ["mine", "first", "later"]
    says_here(store, LATER)
    assert tokens(here.missing(LAST, everybody)) == ["mine"], "the kernel knows that it lives"
    assert tokens(here.missing(LAST, lambda rank: rank == 2)) == ["mine", "first"]
    says_here(store, MINE)
    assert here.missing(LAST, lambda rank: rank == 1) == []
    here.leave(FIRST)
    assert here.missing(LAST, nobody) == []


def test_the_first_view_that_is_proposed_counts():
    store = HashStore()
    here = one_of(store)
    here.propose(ElasticView(number=0, members=(here.me,)))
    one_of(store).propose(ElasticView(number=0, members=(FIRST,)))
    assert here.enter().members == (here.me,)


def test_a_newcomer_does_not_wait_for_ever_for_ranks_of_hosts_that_may_be_lost():
    store = HashStore()
    one_of(store).propose(ElasticView(number=0, members=(FIRST,), known=("first",)))
    with pytest.raises(RendezvousError) as caught:
        RankMembership(store, 1, 2, timeout_s=0.2).enter()
    assert (caught.value.rank, caught.value.elapsed_s) == (1, 0.2)


def test_a_newcomer_whose_job_is_done_or_who_shall_end_is_told_so():
    store = HashStore()
    one_of(store).propose(ElasticView(number=0, members=(MINE,), known=("mine",)))
    with pytest.raises(JobDone):
        RankMembership(store, 1, 2, give_up=lambda: True).enter()
    one_of(store).finish()
    with pytest.raises(JobDone):
        RankMembership(store, 1, 2).enter()


def test_survivors_go_on_with_a_rank_that_has_come_again_after_those_that_are_left():
    store = HashStore()
    here = RankMembership(store, 1, 2)
    last = ElasticView(number=0, members=(FIRST, here.me), known=("first", here.me.token))
    for token in ("first", "again"):  # the launcher has started the rank once more
        here.register(RankMember(token, FIRST.rank, FAR))
    here.announce(last, Progress(committed=5))
    view = here.agree(last, nobody)
    assert tokens([*view.members]) == [here.me.token, "again"]
    assert (view.step, view.source, view.behind) == (5, 0, (1,))


def test_a_member_of_another_host_that_lives_and_does_not_come_is_left_out_in_the_end():
    here = RankMembership(HashStore(), 0, 2, timeout_s=0.05)
    last = ElasticView(number=0, members=(here.me, FIRST), known=(here.me.token, "first"))
    here.announce(last, Progress(committed=5))
    assert here.agree(last, nobody).members == (here.me,)


def test_too_few_survivors_wait_for_more_and_then_end_the_job():
    here = RankMembership(HashStore(), 0, 2, min_ranks=2, enough_s=0.05)
    last = ElasticView(number=0, members=(here.me, GONE), known=(here.me.token, "gone"))
    here.announce(last, Progress(committed=5))
    with pytest.raises(RendezvousError):
        here.agree(last, nobody)


def test_a_rank_that_never_comes_is_waited_for_and_then_done_without():
    here = RankMembership(HashStore(), 0, 3, enough_s=0.05)
    here.register(FIRST)
    assert here.enter().members == (here.me, FIRST)


def test_who_was_left_out_comes_back_as_a_newcomer():
    store = HashStore()
    late = RankMembership(store, 0, 1, enough_s=0.0)
    last = ElasticView(number=0, members=(late.me, FIRST), known=(late.me.token, "first"))
    after = ElasticView(number=1, members=(GONE,), known=(late.me.token, "first", "gone"))
    late.propose(last)
    late.propose(after)  # whose only member has ended since
    late.announce(last, Progress(committed=5))
    view = late.agree(last, nobody)
    assert (view.number, view.members, view.source) == (2, (late.me,), -1)
    assert late.me.token not in last.known


def test_waiting_for_a_group_ends_when_a_member_has_ended_or_given_up():
    here = RankMembership(HashStore(), 0, 2, timeout_s=PATIENCE_S)
    with pytest.raises(PeerLost) as lost:
        here.keys_of(LAST).get("address")
    assert lost.value.peer == 3
    alive = ElasticView(number=4, members=(MINE, FIRST))
    with pytest.raises(StoreTimeout):
        here.keys_of(alive).wait(["address"], timedelta(seconds=0.05))
    here.announce(alive, Progress())
    with pytest.raises(Aborted):
        here.keys_of(alive).multi_get(["address"])
