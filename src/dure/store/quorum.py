"""Which part of a job in a broken network may go on.

A network that falls apart leaves parts that cannot tell each other's death from silence. If two of
them went on, both would write the same checkpoints. So of the *voters*, the members of the last
group that all agreed on, a part needs more than half; or exactly half, with the first of them.

Who is known to have died does not vote. A kernel that lives tells of its processes' deaths: it
closes their connections, and refuses new ones. A machine that vanishes tells nothing, nor does a
network that is cut; who is merely silent votes, and is not here. So no death of a process ever
costs a quorum, and the loss of a whole machine does only if half of the votes went with it.

That two parts cannot both go on: let V be the members, and E1, E2 those whom the parts P1 and P2
know to have died. Nobody is in both parts, and the dead are in neither, so |P1| + |P2| is at most
|V| - |E1 or E2|. If both had their half, it would be at least |V| - (|E1| + |E2|) / 2. Both hold
only if E1 = E2, and then the voters are the same, and their first is in one part alone.

The next group's members are the voters of the time after. This is dynamic voting with a tie broken
by order.

Source: S. Jajodia, D. Mutchler, "Dynamic voting algorithms for maintaining the consistency of a
replicated database", ACM TODS 15 (1990).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["may_go_on"]


def may_go_on(voters: Sequence[tuple[int, bool]]) -> bool:
    """Tell whether a part has the quorum.

    Args:
        voters: Of each member of the last group that is not known to have died, in the group's
            order: how many votes it has, and whether it is in this part.
    """
    every = sum(votes for votes, _ in voters)
    ours = sum(votes for votes, here in voters if here)
    return 2 * ours > every or (2 * ours == every and (not voters or voters[0][1]))
