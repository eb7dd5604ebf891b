"""The errors that all ranks raise together at the end of a backward.

Every rank learns from the flags of the buckets that an error is due, and that all others know it
too: they may communicate once more to say who lacks what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dure.errors import ModuleError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.buckets import Slot

__all__ = ["missing_gradients"]

_MAX_NAMES_SHOWN = 8


def missing_gradients(
    group: ProcessGroup, lacking: Sequence[Slot], unused: Sequence[Slot]
) -> ModuleError:
    """Make the error about parameters that got no gradient; alike on all ranks.

    Collective: all ranks of the group, with the same `lacking`.

    Args:
        group: The ranks.
        lacking: Parameters that some rank got no gradient for.
        unused: Those that this rank got none for.
    """
    mine = torch.tensor([slot in unused for slot in lacking], dtype=torch.uint8)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    group.all_gather(theirs, mine)
    lines: list[str] = []
    for i, slot in enumerate(lacking[:_MAX_NAMES_SHOWN]):
        ranks = [str(rank) for rank, flags in enumerate(theirs) if flags[i]]
        lines.append(f"{slot.name} (on rank {', '.join(ranks)})")
    more = len(lacking) - len(lines)
    return ModuleError(
        "some parameters got no gradient in this backward",
        parameters=tuple(slot.name for slot in lacking),
        rank=group.rank(),
        world_size=group.size(),
        group=group.group_name,
        seen=", ".join(lines) + (f" and {more} more" if more else ""),
        fix="Use every parameter in the loss, freeze the others (requires_grad_(False)), or "
        "pass find_unused_parameters=True.",
    )
