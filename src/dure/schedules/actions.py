"""Actions of a pipeline, and schedules: for each rank, its actions in order.

The vocabulary, which the other files of this package use:

- A model is cut into *stages* 0 to S - 1, a batch into *microbatches* 0 to m - 1. Each stage lies
  on one rank: `placement[stage]`.
- An *action* is one thing that a rank does for one stage, and mostly for one microbatch. Its text
  form is torch's: `0F1` is the forward of stage 0 on microbatch 1, `1B0` a full backward, `1I2`
  and `1W2` its two halves (gradients of the inputs, gradients of the weights), `0SEND_F0` sends
  stage 0's output to stage 1, `1RECV_F0` is its other end, `1SEND_B0` sends the gradient of stage
  1's input to stage 0, `0RECV_B0` is its other end. `0UNSHARD`, `0RESHARD` and `0REDUCE_GRAD` are
  of a complete stage. `(0F1;1B0)OVERLAP_F_B` computes two actions side by side.
- A *schedule* holds each rank's list of actions. A *grid* is a schedule of computation only, where
  None is a time slot in which the rank idles; a list that `lower` made has SEND and RECV, no None.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from dure.errors import ScheduleError, UsageError

__all__ = ["Action", "Kind", "Schedule", "loop_placement", "v_placement"]


class Kind(StrEnum):
    """What an action does; the value is its text form.

    Example:
        ```python
        from dure import schedules

        assert schedules.Kind("F").is_compute and schedules.Kind("SEND_F").is_send
        ```
    """

    __hash__ = str.__hash__  # Enum's own is a function of Python: schedules have 10^5 actions

    FORWARD = "F"
    FULL_BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"

    @cached_property
    def is_compute(self) -> bool:
        """Whether it computes: F, B, I, W or OVERLAP_F_B."""
        return self in _COMPUTE

    @cached_property
    def is_send(self) -> bool:
        """Whether it sends to the next or the previous stage."""
        return self in (Kind.SEND_F, Kind.SEND_B)

    @cached_property
    def is_recv(self) -> bool:
        """Whether it receives from the previous or the next stage."""
        return self in (Kind.RECV_F, Kind.RECV_B)

    @cached_property
    def is_transfer(self) -> bool:
        """Whether it sends or receives."""
        return self.is_send or self.is_recv

    @cached_property
    def of_stage(self) -> bool:
        """Whether it is an action of a stage without a microbatch."""
        return self in _OF_STAGE


_SIMPLE = frozenset("FBIW")
_COMPUTE = _SIMPLE | {"OVERLAP_F_B"}
_OF_STAGE = frozenset(["UNSHARD", "RESHARD", "REDUCE_GRAD"])
# A transfer's other end: its kind, and how many stages away it lies.
_OTHER_END = {
    Kind.SEND_F: (Kind.RECV_F, 1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, 1),
}
_TEXT = re.compile(
    r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|B|I|W)(\d*)", re.ASCII
)


class Action(NamedTuple):
    """One thing that a rank does for one stage.

    Args:
        stage: The stage's index; -1 for OVERLAP_F_B, whose parts have their own.
        kind: What is done.
        microbatch: Of which microbatch; None for actions of a complete stage.
        sub_actions: The parts of an OVERLAP_F_B, else None.

    Example:
        ```python
        action = schedules.Action.parse("1F0")  # stage 1, forward of microbatch 0
        assert (action.stage, action.kind, action.microbatch) == (1, schedules.Kind.FORWARD, 0)
        assert str(action) == "1F0"
        ```
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    sub_actions: tuple[Action, ...] | None = None

    def __str__(self) -> str:
        if self.sub_actions is not None:
            return f"({';'.join(map(str, self.sub_actions))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    __repr__ = __str__

    @property
    def parts(self) -> tuple[Action, ...]:
        """What is done: the parts of an OVERLAP_F_B, else the action itself."""
        return (self,) if self.sub_actions is None else self.sub_actions

    @property
    def other_end(self) -> Action:
        """The receive of a send, and the send of a receive.

        Raises:
            KeyError: It is neither.
        """
        kind, distance = _OTHER_END[self.kind]
        return Action(self.stage + distance, kind, self.microbatch)

    @staticmethod
    def parse(text: str) -> Action:
        """Read an action from its text form, such as `2F0`, `1UNSHARD` or `(0F1;1B0)OVERLAP_F_B`.

        Raises:
            UsageError: It is none.
        """
        text = text.strip()
        if text.startswith("(") and text.endswith(")" + Kind.OVERLAP_F_B):
            inner = text[1 : -len(Kind.OVERLAP_F_B) - 1].split(";")
            parts = tuple(Action.parse(part) for part in inner)
            if len(parts) != 2 or not all(part.kind in _SIMPLE for part in parts):
                raise _no_action(text, "OVERLAP_F_B takes two of F, B, I and W")
            return Action(-1, Kind.OVERLAP_F_B, None, parts)
        found = _TEXT.fullmatch(text)
        if found is None:
            raise _no_action(text, "a stage, a kind and a microbatch")
        stage, kind, microbatch = int(found[1]), Kind(found[2]), found[3]
        if kind.of_stage == bool(microbatch):
            wanted = "no microbatch" if kind.of_stage else "a microbatch"
            raise _no_action(text, f"{kind} with {wanted}")
        return Action(stage, kind, int(microbatch) if microbatch else None)

    @staticmethod
    def from_str(text: str) -> Action | None:
        """Read an action as torch's `_Action` does; a blank text is None, an idle step."""
        return Action.parse(text) if text.strip() else None


def _no_action(text: str, expected: str) -> UsageError:
    return UsageError(
        "this is no action of a pipeline",
        seen=f"{text!r}, expected {expected}",
        fix="Write 2F0, 1B3, 0SEND_F0, 1UNSHARD or (0F1;1B0)OVERLAP_F_B.",
    )


def loop_placement(stages: int, ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage when stages go round the ranks: 0 1 2 0 1 2.

    Args:
        stages: How many stages.
        ranks: How many ranks.

    Returns:
        For each stage its rank.

    Example:
        ```python
        from dure import schedules

        assert schedules.loop_placement(6, 3) == (0, 1, 2, 0, 1, 2)
        ```
    """
    _check_split(stages, ranks)
    return tuple(stage % ranks for stage in range(stages))


def v_placement(stages: int, ranks: int) -> tuple[int, ...]:
    """Return the rank of each stage when stages go there and back: 0 1 2 2 1 0.

    Args:
        stages: How many stages.
        ranks: How many ranks.

    Returns:
        For each stage its rank.

    Example:
        ```python
        assert schedules.v_placement(6, 3) == (0, 1, 2, 2, 1, 0)
        ```
    """
    _check_split(stages, ranks)
    there = range(ranks)
    return tuple(
        there[stage % ranks] if stage // ranks % 2 == 0 else there[-1 - stage % ranks]
        for stage in range(stages)
    )


def _check_split(stages: int, ranks: int) -> None:
    if ranks < 1 or stages < 1 or stages % ranks:
        raise UsageError(
            "every rank has the same number of stages",
            seen=f"{stages} stages on {ranks} ranks",
            fix=f"Take {max(1, stages // max(ranks, 1)) * max(ranks, 1)} stages.",
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each rank does, in order.

    Args:
        ranks: For each rank its actions; None is a time slot without one.
        placement: For each stage its rank.
        microbatches: How many a batch is cut into.
        name: Its name in tables and pictures.

    Obtained from:
        `make_schedule`, `read_schedule` and `Schedule.of_lists`.
    """

    ranks: tuple[tuple[Action | None, ...], ...]
    placement: tuple[int, ...]
    microbatches: int
    name: str = ""

    @staticmethod
    def of_lists(ranks: Sequence[Sequence[Action | None]], name: str = "") -> Schedule:
        """Return the schedule of these lists: stages lie where they compute.

        Raises:
            ScheduleError: A stage computes nowhere.
        """
        where: dict[int, int] = {}
        microbatches = 0
        for rank, actions in enumerate(ranks):
            for action in actions:
                if action is not None and action.kind.is_compute:
                    for part in action.parts:
                        where.setdefault(part.stage, rank)
                        microbatches = max(microbatches, (part.microbatch or 0) + 1)
        missing = sorted({*range(max(where, default=0) + 1)} - set(where))
        if missing:
            raise ScheduleError(
                "a stage computes nowhere",
                seen=f"no forward of stage {missing[0]}",
                fix="Number stages from 0, without gaps.",
            )
        placement = tuple(where[stage] for stage in sorted(where))
        return Schedule(tuple(map(tuple, ranks)), placement, microbatches, name)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of `rank`, in order."""
        return tuple(stage for stage, where in enumerate(self.placement) if where == rank)

    def actions(self, rank: int) -> list[Action]:
        """Return a rank's actions in order, without idle slots."""
        return [action for action in self.ranks[rank] if action is not None]

    @property
    def has_transfers(self) -> bool:
        """Whether there are sends and receives in it, as `lower` writes them."""
        return any(
            action.kind.is_transfer for actions in self.ranks for action in actions if action
        )

    def with_ranks(self, ranks: Sequence[Sequence[Action | None]]) -> Schedule:
        """Return the same schedule with other lists."""
        return Schedule(tuple(map(tuple, ranks)), self.placement, self.microbatches, self.name)
