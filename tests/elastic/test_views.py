"""Which members and which step come next: by hand, and over all histories of a commit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.elastic.views import ElasticView, Progress, RankMember, next_view
from dure.store.identity import Identity


def member(token: str, rank: int = 0) -> RankMember:
    return RankMember(token, rank, Identity(1, "1", "host", "host"))


def four(*tokens: str) -> ElasticView:
    """Return view 4 of these members, which nobody has left."""
    members = tuple(member(t, r) for r, t in enumerate(tokens))
    return ElasticView(number=4, members=members, known=tokens)


def tokens(view: ElasticView) -> str:
    return "".join(m.token for m in view.members)


def test_the_first_view_is_in_the_launchers_order_and_nobody_has_a_state():
    view = next_view(None, [], [member("x", 2), member("y", 0), member("z", 1)])
    assert (view.number, tokens(view)) == (0, "yzx")
    assert (view.source, view.behind, view.step) == (-1, (), 0)


AT = Progress  # committed, and staged


@pytest.mark.parametrize(
    ("survivors", "newcomers", "members", "step", "source", "behind"),
    [
        ({0: AT(7), 2: AT(7)}, [], "ac", 7, 0, ()),
        ({0: AT(7), 2: AT(7)}, [("z", 1)], "acz", 7, 0, (2,)),
        ({0: AT(0)}, [("x", 2), ("y", 1)], "axy", 0, 0, (1, 2)),  # in the order in which they came
        ({0: AT(6, 7), 1: AT(7)}, [], "ab", 7, 0, ()),  # one has committed: it stands
        ({0: AT(6, 7), 1: AT(6, 7)}, [], "ab", 7, 0, ()),  # a dead one may have committed
        ({0: AT(6, 7), 1: AT(6)}, [], "ab", 6, 0, ()),  # nobody can have committed
        ({0: AT(), 1: AT(3)}, [], "ab", 3, 1, (0,)),  # one lost before it got the state
        ({}, [("x", 2), ("z", 1), ("y", 1)], "yzx", 0, -1, ()),  # all are lost: begin anew
    ],
)
def test_the_view_after_a_loss_of_three(
    survivors: dict[int, Progress],
    newcomers: list[tuple[str, int]],
    members: str,
    step: int,
    source: int,
    behind: tuple[int, ...],
):
    last = four("a", "b", "c")
    left = [(last.members[rank], at) for rank, at in survivors.items()]
    view = next_view(last, left, [member(*one) for one in newcomers])
    assert (view.number, view.failure) == (5, "")
    assert (tokens(view), view.step, view.source, view.behind) == (members, step, source, behind)
    assert view.known == ("a", "b", "c", *(t for t in members if t not in "abc"))


def test_too_few_are_a_failure_that_says_who_was_left():
    last = four("a", "b")
    left = [(last.members[1], Progress(1))]
    view = next_view(last, left, [], min_ranks=2)
    assert view.failure and (view.number, tokens(view), view.known) == (5, "b", ("a", "b"))
    assert not next_view(last, left, [member("n")], min_ranks=2).failure
    assert next_view(None, [], []).failure


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
    progress = {
        "before": Progress(step - 1, -1),
        "staged": Progress(step - 1, step),
        "committed": Progress(step, -1),
    }
    last = four(*"abcdef"[: len(stages)])
    left = [
        (m, progress[s])
        for r, (m, s) in enumerate(zip(last.members, stages, strict=True))
        if r not in dead
    ]
    if not left:
        return
    view = next_view(last, left, [])
    assert view.step in (step - 1, step)
    if "committed" in stages:  # even if every rank that had committed it has died
        assert view.step == step
    assert (view.source, view.behind) == (0, ())  # among survivors nothing needs to travel
