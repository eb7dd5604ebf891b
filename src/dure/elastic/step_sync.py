"""Step synchronisation: what ranks tell each other between two steps, all at one moment.

A commit's second phase (`dure.elastic.state`) is one all_reduce of a few numbers, of which the
largest counts. So all ranks learn after the same step, or none does, that

- newcomers wait: all leave `train` and make the group anew;
- some rank was asked to end: all save together, then that rank leaves;
- they are not at the same commit, which is an error of the program.

Rank 0 looks after newcomers for all, now and then.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch

from dure.comm.ops import ReduceOp
from dure.comm.world import current_world
from dure.elastic import preempt
from dure.elastic.membership import Membership
from dure.elastic.state import State
from dure.elastic.views import View
from dure.errors import Desync, StoreError

__all__ = ["Preempted", "Regroup", "StepSync"]

_LOOK_S = 0.2
"""How often rank 0 looks whether newcomers wait, at most."""

_SHARE = 20
"""Looking into a slow store takes at most one part in so many of the time."""

_log = logging.getLogger("dure.elastic")


class Regroup(BaseException):
    """Leaves `train` between two steps, on all ranks alike.

    Not an `Exception`: programs that catch those around a step must not swallow it.
    """


class Preempted(BaseException):
    """Leaves `train` when this rank was asked to end and everything is saved."""


@dataclass(slots=True)
class _Notice:
    """What the ranks tell each other in a commit: the largest of each number counts."""

    newcomers: bool = False
    asked: bool = False
    step: int = 0


class StepSync:
    """One rank's way from step to step.

    Args:
        membership: Knows who waits to be let in.
        state: What is committed.

    Attributes:
        view: The group that is.
        passed: How many commits were complete.
    """

    def __init__(self, membership: Membership, state: State) -> None:
        self._membership, self._state = membership, state
        self._next_look = time.monotonic() + _LOOK_S
        self.view: View | None = None
        self.passed = 0

    def cross(self, step: int) -> None:
        """Carry out the second phase of a commit, and heed what the ranks tell each other.

        Raises:
            Regroup: The group is to be made anew.
            Preempted: This rank was asked to end.
            Desync: The ranks are not at the same commit.
            CommError: A rank is lost.
        """
        notice = self._exchange(_Notice(self._newcomers_wait(), preempt.asked(), step))
        self._state.promote()
        self.passed += 1
        if notice.asked:
            self._end_early()
        if notice.newcomers:
            raise Regroup("newcomers wait")

    def meet(self) -> None:
        """Meet after the last commit; otherwise as `cross`."""
        self._exchange(_Notice(step=self._state.commits))

    def _exchange(self, mine: _Notice) -> _Notice:
        group = current_world().need_default()
        where = "cpu" if "cpu" in group.device_types else min(group.device_types)
        numbers = [int(mine.newcomers), int(mine.asked), mine.step, -mine.step]
        flags = torch.tensor(numbers, device=where)
        group.all_reduce(flags, ReduceOp.MAX)
        newcomers, asked, most, least = flags.tolist()
        if most != -least:
            raise Desync(
                "the ranks are not at the same commit",
                rank=group.rank(),
                world_size=group.size(),
                seen=f"after {mine.step} commits here, after {-least} to {most} on all ranks",
                fix="Call state.commit() as often on every rank; loops of unequal length need "
                "drop_last=True, or equal shares.",
            )
        return _Notice(bool(newcomers), bool(asked), most)

    def _newcomers_wait(self) -> bool:
        """On rank 0, now and then: look who waits to be let in.

        A store that does not answer ends nothing here: the group that is needs none.
        """
        view, began = self.view, time.monotonic()
        assert view is not None
        if view.members[0].token != self._membership.me.token or began < self._next_look:
            return False
        try:
            return self._membership.table.waiting(view)
        except StoreError as error:
            _log.warning("newcomers cannot be let in: %s", error)
            return False
        finally:
            now = time.monotonic()
            self._next_look = now + max(_LOOK_S, _SHARE * (now - began))

    def _end_early(self) -> None:
        """Some rank was asked to end: save together, then those that were asked leave."""
        preempt.run_callbacks()
        raise Preempted if preempt.asked() else Regroup("a rank was asked to end")
