"""The boundary between two steps: what ranks tell each other there, all at one moment.

A commit's second phase (`dure.elastic.state`) is one all_reduce of a few numbers, of which the
largest counts. So all ranks learn after the same step, or none does, that

- newcomers wait, or the store is lost or has moved: all leave `train` and make the group anew;
- some rank was asked to end: all save together, then that rank leaves;
- they are not at the same commit, which is an error of the program.

Rank 0 looks after newcomers and the store for all, now and then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from dure.comm.ops import ReduceOp
from dure.comm.world import current_world
from dure.elastic import preempt
from dure.elastic.council import Council
from dure.elastic.keeper import Keeper
from dure.elastic.roster import Plan
from dure.elastic.state import State
from dure.errors import Desync, StoreError

__all__ = ["Boundary", "Preempted", "Regroup"]

_LOOK_S = 0.2
"""How often rank 0 looks whether newcomers wait, at most."""


class Regroup(BaseException):
    """Leaves `train` at a step boundary, on all ranks alike.

    Not an `Exception`: programs that catch those around a step must not swallow it.
    """


class Preempted(BaseException):
    """Leaves `train` when this rank was asked to end and everything is saved."""


@dataclass(slots=True)
class _Notice:
    """What the ranks tell each other in a commit: the largest of each number counts."""

    newcomers: bool = False
    asked: bool = False
    storeless: bool = False
    step: int = 0


class Boundary:
    """One rank's way from step to step.

    Args:
        council: Knows who waits to be let in.
        keeper: Knows where the store is.
        state: What is committed.

    Attributes:
        plan: The epoch that runs.
        storeless: Whether the store is known to be lost, or to have moved.
        passed: How many commits were complete.
    """

    def __init__(self, council: Council, keeper: Keeper, state: State) -> None:
        self._council, self._keeper, self._state = council, keeper, state
        self._looked = time.monotonic()
        self.plan: Plan | None = None
        self.storeless = False
        self.passed = 0

    def cross(self, step: int) -> None:
        """Carry out the second phase of a commit, and heed what the ranks tell each other.

        Raises:
            Regroup: The group is to be made anew.
            Preempted: This rank was asked to end.
            Desync: The ranks are not at the same commit.
            CommError: A rank is lost.
        """
        notice = self._exchange(_Notice(asked=preempt.asked(), step=step, **self._look()))
        self._state.promote()
        self.passed += 1
        if notice.asked:
            self._end_early()
        self.storeless = self.storeless or notice.storeless
        if notice.newcomers or notice.storeless:
            raise Regroup("newcomers wait" if notice.newcomers else "the store is lost")

    def meet(self) -> None:
        """Meet after the last commit; otherwise as `cross`."""
        self._exchange(_Notice(step=self._state.commits))

    def _exchange(self, mine: _Notice) -> _Notice:
        group = current_world().need_default()
        where = "cpu" if "cpu" in group.device_types else min(group.device_types)
        numbers = [int(mine.newcomers), int(mine.asked), int(mine.storeless), mine.step, -mine.step]
        flags = torch.tensor(numbers, device=where)
        group.all_reduce(flags, ReduceOp.MAX)
        newcomers, asked, storeless, most, least = flags.tolist()
        if most != -least:
            raise Desync(
                "the ranks are not at the same commit",
                rank=group.rank(),
                world_size=group.size(),
                seen=f"after {mine.step} commits here, after {-least} to {most} on all ranks",
                fix="Call state.commit() as often on every rank; loops of unequal length need "
                "drop_last=True, or equal shares.",
            )
        return _Notice(bool(newcomers), bool(asked), bool(storeless), most)

    def _look(self) -> dict[str, bool]:
        """Rank 0 looks, now and then, who waits to be let in, and where the store is."""
        now = time.monotonic()
        assert self.plan is not None
        is_first = self.plan.members[0].token == self._council.me.token
        if not is_first or now - self._looked < _LOOK_S:
            return {}
        self._looked = now
        try:
            if self._keeper.lost or self._keeper.moved():
                return {"storeless": True}
            return {"newcomers": self._council.waiting(self.plan)}
        except StoreError:
            self.storeless = True
            return {"storeless": True}

    def _end_early(self) -> None:
        """Some rank was asked to end: save together, then those that were asked leave."""
        preempt.run_callbacks()
        raise Preempted if preempt.asked() else Regroup("a rank was asked to end")
