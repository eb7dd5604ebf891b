"""What happens to a step when a stage raises.

The rank on which an exception is raised computes nothing more in this step. Its remaining sends
become *poison*: transfers without a value, with a report of the failure. A rank that receives
poison does the same. So every send finds its receive, and no rank waits forever. At the step's end
all ranks exchange their reports, and raise the same error.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dure.errors import CommError, PipelineError
from dure.schedules import Action

__all__ = [
    "FailureReport",
    "Poisoned",
    "error_of",
    "place_in_schedule",
    "report_of",
    "verify_finite",
]


@dataclass(frozen=True, slots=True)
class FailureReport:
    """An exception of a stage, in a form that travels.

    Attributes:
        rank: Of the pipeline's group.
        action: Text form of what was being done.
        stage: Whose action.
        microbatch: Of which microbatch; -1 if the action concerns all of them.
        error: Type and message.
        trace: The traceback.
    """

    rank: int
    action: str
    stage: int
    microbatch: int
    error: str
    trace: str


class Poisoned(Exception):
    """A transfer brought no value, but a report of why there is none."""

    def __init__(self, report: FailureReport) -> None:
        self.report = report
        super().__init__(report.action)


def report_of(error: BaseException, rank: int, action: Action) -> FailureReport:
    """Describe an exception that an action raised."""
    return FailureReport(
        rank=rank,
        action=str(action),
        stage=action.stage,
        microbatch=-1 if action.microbatch is None else action.microbatch,
        error="".join(traceback.format_exception_only(error)).strip(),
        trace="".join(traceback.format_exception(error)),
    )


def error_of(
    reports: Sequence[FailureReport], group: str, rank: int, world_size: int
) -> PipelineError:
    """Return the error that all ranks raise, which describes the first report."""
    first = reports[0]
    others = [f"{r.action} on rank {r.rank}: {r.error}" for r in reports[1:]]
    return PipelineError(
        "a stage of the pipeline failed",
        action=first.action,
        stage=first.stage,
        microbatch=first.microbatch,
        remote_traceback=first.trace,
        others=tuple(others),
        op="step",
        group=group,
        rank=rank,
        world_size=world_size,
        peer=first.rank,
        seen=f"{first.error} (stage {first.stage}, action {first.action}, rank {first.rank})"
        + "".join(f"; also {other}" for other in others),
        fix="Gradients of this step are incomplete: zero them. The group is intact, and the next "
        f"step works. There:\n{first.trace}",
    )


def place_in_schedule(error: CommError, action: Action) -> None:
    """Say in an error of the group at which action this rank was."""
    error.advise(f"This rank was at the action {action} of its pipeline.")
    error.action = str(action)  # pyright: ignore[reportAttributeAccessIssue]


def verify_finite(what: str, tensors: Sequence[torch.Tensor | None]) -> None:
    """Raise a FloatingPointError if one of `tensors` has a NaN or an infinity."""
    for i, tensor in enumerate(tensors):
        if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            bad = tensor.numel() - int(finite.sum())
            raise FloatingPointError(
                f"{bad} of {tensor.numel()} numbers of {what} {i} are not finite"
            )
