"""Which members and which step come next: the rule, over all histories of a commit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dure.elastic.roster import NOTHING, Here, Member, Plan, next_plan
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
