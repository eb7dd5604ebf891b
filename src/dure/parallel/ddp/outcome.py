"""The ranks' reports about a backward: which parameters they used, and which errors occurred.

*The used-parameter bitmap* is sent along with the last bucket:

    | used (one number a parameter) | error |

It is reduced by the collective of that bucket, which is never started before backward has ended,
when a rank knows everything that it has to report:

* `used` is 1 for each parameter that this rank has a gradient of. After the reduction it is 0 where
  no rank has one: such a parameter keeps its gradient as it was.
* `error` is 1 if anything went wrong here. After the reduction it is 0 unless it was set on some
  rank; otherwise all ranks know it.

With a communication hook it is sent alone, when the hook's results are complete (comm_hooks.py).
Zero is zero in every format, divided by any number; no other value is asked for but in
`all_used`.

*Error records.* Where the bitmap has an error, the ranks communicate once more to say what it is
(`agreed_error`), and raise the same error at the same step. So no rank waits for one that has given
up, and all name the same parameters.

*Usage over the steps* (`UsageHistory`): is the graph static, is the search for unused parameters
needed? ``find_unused_parameters`` costs a look at every parameter in every backward. A program that
passes it and uses all parameters in its first step gets a warning, once. A graph whose unused
parameters are always the same could have been declared static (torch's logging data say so).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from dure.errors import HookError, ModuleError, PerformanceWarning
from dure.training.agreement import gather_texts
from dure.training.grad_views import GradView

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["ErrorKind", "ErrorRecord", "UsageHistory", "UsedParameters", "agreed_error", "shown"]

_MAX_NAMES_SHOWN = 8


class UsedParameters:
    """The bitmap, at the end of the last bucket's flat tensor."""

    __slots__ = ("_most", "_size", "flags")

    def __init__(self, flat: torch.Tensor, num_parameters: int, num_ranks: int) -> None:
        self.flags = flat[flat.numel() - num_parameters - 1 :]
        self._size = num_parameters
        self._most = 1 - 0.5 / num_ranks

    @staticmethod
    def size(num_parameters: int) -> int:
        """Return how many elements it has."""
        return num_parameters + 1

    def write(self, unused: Iterable[GradView], error: bool) -> None:
        """Enter this rank's part."""
        self.flags.fill_(1)
        for view in unused:
            self.flags[view.number] = 0
        if not error:
            self.flags[self._size] = 0

    def add_error(self) -> None:
        """Enter that something went wrong here after all."""
        self.flags[self._size] = 1

    def write_nothing(self) -> None:
        """Enter that this rank used nothing and lacks nothing."""
        self.flags.zero_()

    def all_used(self) -> bool:
        """Tell, of averaged flags, whether every rank used everything."""
        used = self.flags[: self._size]
        used = torch.view_as_real(used)[:, 0] if used.is_complex() else used
        return bool(used.min() > self._most)

    def used(self) -> list[bool]:
        """Tell of each parameter whether any rank used it."""
        return (self.flags[: self._size] != 0).tolist()

    def error(self) -> bool:
        """Tell whether anything went wrong on any rank."""
        return bool(self.flags[self._size] != 0)


class ErrorKind(Enum):
    """Errors of a backward; the first of several is reported. A member is (what, fix)."""

    BROKEN = (
        "a backward ended with an exception on some ranks",
        "That exception is the one to look at. The gradients of this step are worth nothing: call "
        "zero_grad() on all ranks, and continue with the next batch.",
    )
    """An exception ended the backward."""
    HOOK = (
        "a communication hook failed on some ranks",
        "Those ranks raise the hook's own error, with its bucket.",
    )
    """A hook raised an exception, or its result does not fit."""
    REPLACED = (
        "parameters were replaced after the module was wrapped",
        "Wrap the module after all changes to it, or change the parameters' values in place.",
    )
    """A parameter without a gradient is not the module's any more."""
    MOVED = (
        "parameters have another dtype, device or shape than when the module was wrapped",
        "Wrap the module again after the change: DistributedDataParallel(ddp.module).",
    )
    """A gradient does not fit the bucket that was made for it."""
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
        "Call requires_grad_() with the same value on all ranks.",
    )
    """Other ranks train what this rank has frozen."""
    MISSING = (
        "some parameters got no gradient in this backward",
        "Use every parameter in the loss, freeze the others (requires_grad_(False)), or pass "
        "find_unused_parameters=True.",
    )
    """A parameter that is trained got no gradient."""


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """What went wrong on one rank, with one parameter or with none in particular."""

    kind: ErrorKind
    view: GradView | None = None


def agreed_error(
    group: ProcessGroup, mine: Sequence[ErrorRecord], names: Sequence[str]
) -> ModuleError | None:
    """Exchange the error records of all ranks; make the error to raise, the same on all of them.

    Collective:
        All ranks of the group.

    Args:
        group: The ranks.
        mine: The errors of this rank.
        names: Of all parameters, in the order of registration.

    Returns:
        The error; None on a rank whose own exception is the cause, as its program has seen it.
    """
    lines = dict.fromkeys(f"{r.kind.name} {-1 if r.view is None else r.view.number}" for r in mine)
    records = [
        [(ErrorKind[kind], int(number)) for kind, number in map(str.split, texts)]
        for texts in gather_texts(group, "\n".join(lines).encode())
    ]
    order = list(ErrorKind)
    worst = min((kind for texts in records for kind, _ in texts), key=order.index)
    if worst is ErrorKind.BROKEN and any(record.kind is worst for record in mine):
        return None
    concerned: dict[int, list[str]] = {}
    for rank, texts in enumerate(records):
        for kind, number in texts:
            if kind is worst:
                concerned.setdefault(number, []).append(str(rank))
    numbers = sorted(concerned)
    seen = [
        (
            f"{names[n]} (on rank {', '.join(concerned[n])})"
            if n >= 0
            else f"rank {', '.join(concerned[n])}"
        )
        for n in numbers
    ]
    what, fix = worst.value
    error = HookError if worst is ErrorKind.HOOK else ModuleError
    return error(
        what,
        parameters=tuple(names[n] for n in numbers if n >= 0),
        rank=group.rank(),
        world_size=group.size(),
        group=group.group_name,
        seen=shown(seen),
        fix=fix,
    )


def shown(names: Sequence[str]) -> str:
    """Return the first few of `names`, and how many more there are."""
    more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


class UsageHistory:
    """What the steps so far have shown.

    Attributes:
        is_static: All steps left the same parameters unused.
    """

    def __init__(self) -> None:
        self.is_static = True
        self._unused_before: list[int] | None = None
        self._needless = False

    def note(self, unused: Sequence[int], searched: bool) -> None:
        """Take in the numbers of a step's unused parameters; `searched`: a graph that changes."""
        if self._unused_before is None:
            self._unused_before = list(unused)
            self._needless = searched and not unused
        elif unused != self._unused_before:
            self.is_static = False

    def warn_once(self) -> None:
        """Warn, at the begin of the second forward, of a search that finds nothing."""
        if self._needless:
            self._needless = False
            warnings.warn(
                "find_unused_parameters=True, but the first step used all parameters: leave it "
                "out, unless later steps use fewer",
                PerformanceWarning,
                stacklevel=4,
            )
