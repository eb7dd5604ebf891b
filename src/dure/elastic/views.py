"""Who is in the group, view by view: the values that ranks agree on, and the rule they follow.

A *view* is one group of ranks, from its forming to the loss of a member, or to the arrival of
others: its members in order (their ranks), and where the state comes from. Views are numbered. What
a rank has when a view ends is two numbers: the step that it has *committed*, and the one that it
has *staged*, which is the next one or none (`State`).

**Which step stands** (`next_view`). A commit is complete on a rank when all ranks are known to have
staged the step. So of ranks that are left:

- if one has committed step s, then all have at least staged it: s stands, and those who have it
  staged take it from there;
- if none has committed s, but all have staged it, it stands as well: perhaps a rank that died had
  committed it;
- otherwise some rank has not even staged s, and s - 1, which all have, stands.

So a step that any rank ever saw committed is never lost, and at most one step is done again.
Newcomers have nothing, and get the step from the first member that has it.

Nothing here does any input or output: `dure.elastic.membership` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dure.store.identity import Identity

__all__ = ["ElasticView", "Progress", "RankMember", "next_view"]


class RankMember(msgspec.Struct, array_like=True, frozen=True):
    """One time that one process joins; `rank` is what the launcher called it."""

    token: str
    rank: int
    process: Identity

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})"


class Progress(msgspec.Struct, array_like=True, frozen=True):
    """What a rank has at the end of a view: the numbers of steps, -1 where it has none.

    Obtained from:
        Dure makes them, when the ranks of an elastic job agree after a failure.
    """

    committed: int = -1
    staged: int = -1

    def has(self, step: int) -> bool:
        """Return whether the state after `step` can be had from this rank."""
        return step >= 0 and step in (self.committed, self.staged)


class ElasticView(msgspec.Struct, array_like=True, frozen=True):
    """A group's members and state.

    Attributes:
        number: Its number.
        members: In the order of their ranks.
        step: The step after which it continues.
        source: The rank that has the state; -1: none has, each begins with its own.
        behind: The ranks that get the state from there.
        known: Tokens of all former and present members: one that comes back has a new one.
        failure: Why there can be no such group, if that is so.
    """

    number: int
    members: tuple[RankMember, ...]
    step: int = 0
    source: int = -1
    behind: tuple[int, ...] = ()
    known: tuple[str, ...] = ()
    failure: str = ""

    def rank_of(self, token: str) -> int:
        """Return the rank of the member with this token, or -1."""
        return next((r for r, m in enumerate(self.members) if m.token == token), -1)


def next_view(
    last: ElasticView | None,
    survivors: Sequence[tuple[RankMember, Progress]],
    newcomers: Sequence[RankMember],
    min_ranks: int = 1,
) -> ElasticView:
    """Return the view that follows.

    Args:
        last: The view that has ended; None before the first.
        survivors: Members of it that are left, in its order, and what each has.
        newcomers: Others, in the order in which they came.
        min_ranks: With fewer members there is a failure in place of a group.
    """
    number = 0 if last is None else last.number + 1
    known = () if last is None else last.known
    if last is None or not survivors:
        newcomers = sorted(newcomers, key=lambda m: (m.rank, m.token))
    members = (*(member for member, _ in survivors), *newcomers)
    if len(members) < min_ranks:
        seen = f"{len(members)} ranks are left, and at least {min_ranks} are wanted"
        return ElasticView(number=number, members=members, known=known, failure=seen)
    step = _standing([progress for _, progress in survivors])
    haves = [progress.has(step) for _, progress in survivors] + [False] * len(newcomers)
    source = haves.index(True) if True in haves else -1
    behind = tuple(r for r, has in enumerate(haves) if not has) if source >= 0 else ()
    return ElasticView(
        number=number,
        members=members,
        step=max(step, 0),
        source=source,
        behind=behind,
        known=tuple(dict.fromkeys([*known, *(m.token for m in members)])),
    )


def _standing(all_progress: Sequence[Progress]) -> int:
    """Return the step that stands (see the module's text); -1 if no rank has any."""
    committed = max((progress.committed for progress in all_progress), default=-1)
    if all_progress and all(progress.staged == committed + 1 for progress in all_progress):
        return committed + 1
    return committed
