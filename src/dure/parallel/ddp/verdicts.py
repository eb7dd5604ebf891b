"""The errors that all ranks raise together at the end of a backward.

Every rank learns from the ledger that an error is due, and that all others know it too: they
communicate once more to say who is in what trouble. So no rank waits for one that has given up, and
all name the same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dure.comm.agreement import gather_texts
from dure.errors import HookError, ModuleError
from dure.parallel.ddp.wrapping import shown

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.slots import Slot

__all__ = ["Complaint", "Trouble", "verdict"]


class Trouble(Enum):
    """What can go wrong in a backward; the first of several is told. A member is (what, fix)."""

    BROKEN = (
        "a backward ended with an exception on some ranks",
        "That exception is the one to look at. The gradients of this step are worth nothing: call "
        "zero_grad() on all ranks, and go on with the next batch.",
    )
    """An exception ended the backward."""
    HOOK = (
        "a communication hook failed on some ranks",
        "Those ranks raise the hook's own error, with its bucket.",
    )
    """A hook raised an exception, or its result does not fit."""
    CHANGED = (
        "Your training graph has changed in this iteration, although static_graph=True",
        "Leave static_graph out, or make every step use the same parameters equally often.",
    )
    """A parameter got more or fewer gradients than in the first step."""
    LATE = (
        "gradients changed after their buckets had been reduced",
        "Parameters that several reentrant checkpoints use get gradients more than once in a "
        "backward: use the checkpoint function with use_reentrant=False, or pass "
        "static_graph=True.",
    )
    """A gradient came after its bucket was on its way."""
    FROZEN = (
        "parameters are frozen on some ranks only",
        "Call requires_grad_() alike on all ranks.",
    )
    """Other ranks train what this rank has frozen."""
    MISSING = (
        "some parameters got no gradient in this backward",
        "Use every parameter in the loss, freeze the others (requires_grad_(False)), or pass "
        "find_unused_parameters=True.",
    )
    """A parameter that is trained got no gradient."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """One rank's trouble, with one parameter or with none in particular."""

    trouble: Trouble
    slot: Slot | None = None


def verdict(
    group: ProcessGroup, mine: Sequence[Complaint], names: Sequence[str]
) -> ModuleError | None:
    """Make the error that is due; alike on all ranks.

    Collective: all ranks of the group.

    Args:
        group: The ranks.
        mine: What is wrong on this rank.
        names: Of all parameters, in the order of registration.

    Returns:
        The error; None on a rank whose own exception is the cause, as its program has seen it.
    """
    lines = [f"{c.trouble.name} {-1 if c.slot is None else c.slot.number}" for c in mine]
    heard = [
        [(Trouble[kind], int(number)) for kind, number in map(str.split, texts)]
        for texts in gather_texts(group, "\n".join(lines).encode())
    ]
    order = list(Trouble)
    worst = min((t for texts in heard for t, _ in texts), key=order.index)
    if worst is Trouble.BROKEN and any(c.trouble is worst for c in mine):
        return None
    concerned: dict[int, list[str]] = {}
    for rank, texts in enumerate(heard):
        for trouble, number in texts:
            if trouble is worst:
                concerned.setdefault(number, []).append(str(rank))
    numbers = sorted(concerned)
    heard_of = [
        (
            f"{names[n]} (on rank {', '.join(concerned[n])})"
            if n >= 0
            else f"rank {', '.join(concerned[n])}"
        )
        for n in numbers
    ]
    what, fix = worst.value
    kind = HookError if worst is Trouble.HOOK else ModuleError
    return kind(
        what,
        parameters=tuple(names[n] for n in numbers if n >= 0),
        rank=group.rank(),
        world_size=group.size(),
        group=group.group_name,
        seen=shown(heard_of),
        fix=fix,
    )
