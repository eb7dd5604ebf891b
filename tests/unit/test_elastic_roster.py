"""Which members and which step come next: the rule, over all histories of a commit."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.elastic.roster import NOTHING, Here, Member, Plan, has_quorum, next_plan
from dure.store.identity import Identity


def member(token: str, rank: int = 0) -> Member:
    return Member(token, rank, Identity(1, "1", "host", "host"))


def epoch(*tokens: str) -> Plan:
    members = tuple(member(t, r) for r, t in enumerate(tokens))
    return Plan(number=4, members=members, known=tokens)


def test_the_first_epoch_is_in_the_launchers_order_and_nobody_has_a_state():
    plan = next_plan(None, [], [member("x", 2), member("y", 0), member("z", 1)])
    assert [m.token for m in plan.members] == ["y", "z", "x"]
    assert (plan.number, plan.source, plan.behind, plan.step) == (0, -1, (), 0)


def test_survivors_keep_their_order_and_newcomers_come_after_them():
    last = epoch("a", "b", "c")
    survivors = [(last.members[0], Here(7, -1)), (last.members[2], Here(7, -1))]
    plan = next_plan(last, survivors, [member("n", 1)])
    assert [m.token for m in plan.members] == ["a", "c", "n"]
    assert (plan.number, plan.step, plan.source, plan.behind) == (5, 7, 0, (2,))
    assert plan.known == ("a", "b", "c", "n")


def test_too_few_are_a_failure():
    last = epoch("a", "b")
    assert next_plan(last, [(last.members[0], Here(1))], [], min_ranks=2).failure
    assert not next_plan(last, [(last.members[0], Here(1))], [member("n")], min_ranks=2).failure


def test_a_survivor_without_any_state_gets_it_from_another():
    last = epoch("a", "b")
    survivors = [(last.members[0], NOTHING), (last.members[1], Here(3, -1))]
    plan = next_plan(last, survivors, [])
    assert (plan.step, plan.source, plan.behind) == (3, 1, (0,))


STAGES = ("before", "staged", "committed")


@given(
    stages=st.lists(st.sampled_from(STAGES), min_size=2, max_size=6),
    dead=st.sets(st.integers(0, 5)),
    step=st.integers(1, 100),
)
def test_no_committed_step_is_lost_and_one_at_most_is_done_again(
    stages: list[str], dead: set[int], step: int
):
    """Each rank is somewhere in commit `step`; none commits before all have staged it."""
    if "committed" in stages:
        stages = ["staged" if s == "before" else s for s in stages]
    heres = {
        "before": Here(step - 1, -1),
        "staged": Here(step - 1, step),
        "committed": Here(step, -1),
    }
    last = epoch(*"abcdef"[: len(stages)])
    left = [
        (m, heres[s])
        for r, (m, s) in enumerate(zip(last.members, stages, strict=True))
        if r not in dead
    ]
    if not left:
        return
    plan = next_plan(last, left, [])
    assert plan.step in (step - 1, step)
    if "committed" in stages:  # even if every rank that had committed it has died
        assert plan.step == step
    for rank, (_, here) in enumerate(left):
        assert here.has(plan.step) != (rank in plan.behind)
    assert plan.source >= 0 and plan.source not in plan.behind
    assert plan.behind == ()  # among survivors of one epoch nothing needs to travel


def on(host: str, token: str, rank: int = 0) -> Member:
    return Member(token, rank, Identity(1, "1", host, host))


FOUR = Plan(number=0, members=(on("x", "a"), on("x", "b"), on("y", "c"), on("y", "d")))


@pytest.mark.parametrize(
    ("here", "ended", "goes_on"),
    [
        ("abc", "", True),
        ("ab", "", True),  # half, with the first
        ("cd", "", False),
        ("cd", "a", True),  # of b, c and d
        ("c", "ad", False),  # of b and c, b is the first
        ("bc", "d", True),
        ("b", "acd", True),
        ("", "abc", False),
        ("ab", "ab", True),  # who is here votes, whatever is told of it
        ("bd", "", False),  # a host's other ranks are not here with one of them
    ],
)
def test_more_than_half_of_the_members_or_half_with_the_first_go_on(
    here: str, ended: str, goes_on: bool
):
    members = [m for m in FOUR.members if m.token in here]
    assert has_quorum(FOUR, members, ended, expected=4) == goes_on


def test_the_host_of_a_newcomer_votes_with_it_but_the_newcomer_has_no_vote_of_its_own():
    c, d = FOUR.members[2:]
    assert has_quorum(FOUR, [c, d, on("x", "new")], "", expected=4)
    assert not has_quorum(FOUR, [c, d, on("z", "new")], "", expected=4)
    assert not has_quorum(FOUR, [c, *(on("z", t) for t in "efg")], "", expected=4)


@pytest.mark.parametrize(
    ("ranks", "goes_on"), [((0, 1), True), ((2, 3), False), ((1, 2, 3), True), ((1, 1, 1), False)]
)
def test_before_the_first_epoch_all_ranks_vote_that_were_started(
    ranks: tuple[int, ...], goes_on: bool
):
    here = [on("x", f"t{i}", rank) for i, rank in enumerate(ranks)]
    assert has_quorum(None, here, "", expected=4) == goes_on


def test_newcomers_on_their_own_are_in_the_launchers_order_and_begin_anew():
    last = msgspec.structs.replace(epoch("a"), step=9)
    plan = next_plan(last, [], [member("x", 2), member("z", 1), member("y", 1)])
    assert [m.token for m in plan.members] == ["y", "z", "x"]
    assert (plan.number, plan.source, plan.behind, plan.step) == (5, -1, (), 0)


def test_newcomers_that_join_survivors_stand_in_the_order_in_which_they_came():
    last = epoch("a")
    plan = next_plan(last, [(last.members[0], Here(0))], [member("x", 2), member("y", 1)])
    assert [m.token for m in plan.members] == ["a", "x", "y"]
    assert (plan.step, plan.source, plan.behind) == (0, 0, (1, 2))


def test_an_epoch_that_cannot_be_says_who_was_left_and_enough_are_no_failure():
    last = epoch("a", "b")
    plan = next_plan(last, [(last.members[1], Here(1))], [], min_ranks=2)
    assert (plan.number, [m.token for m in plan.members], plan.known) == (5, ["b"], ("a", "b"))
    assert (plan.step, plan.source) == (0, -1)
    assert next_plan(None, [], []).failure
    assert not next_plan(None, [], [member("x")]).failure


def test_a_rank_knows_its_place_and_what_it_has():
    last = epoch("a", "b")
    assert [last.rank_of(t) for t in ("a", "b", "c")] == [0, 1, -1]
    assert [Here(4, 5).has(step) for step in (3, 4, 5, 6)] == [False, True, True, False]
    assert Here(-1, -1) == NOTHING
    assert not any(NOTHING.has(step) for step in (-1, 0))
    assert Here(0).has(0)
    assert "rank 3" in str(member("a", 3))
