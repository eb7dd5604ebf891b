"""How a process comes to an epoch, with a store in this process and peers that are only written."""

from __future__ import annotations

import threading

import msgspec
import pytest

from dure.elastic.council import Council
from dure.elastic.roster import Here, Member, Plan
from dure.errors import RendezvousError, StoreLost
from dure.store import HashStore
from dure.store.identity import Identity

FAR = Member("far", 0, Identity(1, "1", "elsewhere", "another host"))


def test_a_newcomer_does_not_wait_for_ever_for_ranks_of_hosts_that_may_be_lost():
    store = HashStore()
    store.set("0/plan", msgspec.msgpack.encode(Plan(number=0, members=(FAR,), known=("far",))))
    with pytest.raises(RendezvousError) as caught:
        Council(store, 1, 2, patience_s=0.2).enter()
    assert caught.value.rank == 1
    assert caught.value.elapsed_s == 0.2


def test_a_member_whose_rank_has_come_again_has_ended():
    store = HashStore()
    here = Council(store, 1, 2, patience_s=30)
    last = Plan(number=0, members=(FAR, here.me), known=("far", here.me.token))
    for token in ("far", "again"):  # the launcher has started rank 0 once more
        store.set(f"member/{token}", msgspec.msgpack.encode(Member(token, 0, FAR.process)))
        store.append("new", f"{token}\n")
    here.announce(last, Here(committed=5))
    plan = here.agree(last, lambda rank: False)
    assert [member.token for member in plan.members] == [here.me.token, "again"]
    assert (plan.step, plan.source, plan.behind) == (5, 0, (1,))


def test_a_newcomer_in_a_store_to_which_the_job_moves_is_let_in_there():
    store = HashStore()
    trains = Council(HashStore(), 0, 2)
    newcomer = Council(store, 1, 2, patience_s=30)
    found: list[Plan] = []
    thread = threading.Thread(target=lambda: found.append(newcomer.enter()))
    thread.start()
    last = Plan(number=7, members=(trains.me,), known=(trains.me.token,))
    trains.move(store, last)
    while not trains.waiting(last):
        pass
    trains.announce(last, Here(committed=70))
    plan = trains.agree(last, lambda rank: False)
    thread.join(30)
    assert found == [plan]
    assert (plan.number, plan.step, len(plan.members)) == (8, 70, 2)


def test_a_newcomer_does_not_wait_where_the_job_has_left():
    with pytest.raises(StoreLost):
        Council(HashStore(), 0, 2, elsewhere=lambda: True).enter()


def last_of(me: Council, *others: Member) -> Plan:
    """Return an epoch whose first rank is this process's, or another's if `others` come first."""
    members = (*others, me.me)
    return Plan(number=0, members=members, known=tuple(m.token for m in members))


def nobody(rank: int) -> bool:
    return False


def test_half_of_the_ranks_without_the_first_end_when_nothing_is_heard_of_the_others():
    store = HashStore()
    council = Council(store, 1, 2, patience_s=0.1, divisible=lambda: True)
    last = last_of(council, FAR)
    council.announce(last, Here(committed=5))
    with pytest.raises(RendezvousError) as caught:
        council.agree(last, lambda rank: True, severed=lambda rank: True)
    assert "elsewhere" in caught.value.seen
    assert not store.check(["1/plan"]), "who was silent may write it"


@pytest.mark.parametrize(
    ("divisible", "silent"), [(False, True), (True, False)], ids=["one store", "seen to die"]
)
def test_half_of_the_ranks_go_on_if_the_others_are_dead_or_could_not(divisible, silent):
    council = Council(HashStore(), 1, 2, patience_s=30, divisible=lambda: divisible)
    last = last_of(council, FAR)
    council.announce(last, Here(committed=5))
    plan = council.agree(last, lambda rank: True, severed=lambda rank: silent)
    assert [m.token for m in plan.members] == [council.me.token]


def test_a_host_that_sends_newcomers_is_not_waited_for():
    store = HashStore()
    council = Council(store, 1, 2, patience_s=30, divisible=lambda: True)
    last = last_of(council, FAR)
    again = Member("again", 7, Identity(2, "2", FAR.process.host, "another boot"))
    store.set("member/again", msgspec.msgpack.encode(again))
    store.append("new", "again\n")
    council.announce(last, Here(committed=5))
    plan = council.agree(last, lambda rank: True, severed=lambda rank: True)
    assert [m.token for m in plan.members] == [council.me.token, "again"]


def test_a_replacement_alone_in_a_later_store_does_not_begin_anew():
    council = Council(HashStore(), 1, 2, patience_s=0.1, enough_s=0.05, astray=lambda: True)
    with pytest.raises(RendezvousError):
        council.enter()


def test_who_sees_a_process_of_its_host_end_tells_all():
    store = HashStore()
    dead = Member("dead", 0, Identity(1, "never", "here", Council(store, 1, 2).me.process.host_id))
    council = Council(store, 1, 2, patience_s=30)
    last = last_of(council, dead)
    council.announce(last, Here(committed=5))
    council.agree(last, nobody)
    assert b"dead" in store.get("left")
