"""The state of a training run, committed step by step.

A commit has two phases, so that a death at any moment leaves a step that all survivors have:

1. *Stage.* The state is copied into a snapshot beside the committed one. No communication.
2. *Agree.* One small all_reduce. When it completes, every rank has staged the step; the staged
   snapshot becomes the committed one, and the two change places for the next time.

A rank that dies before (2) is complete leaves survivors of which all, or not all, have staged the
step; `dure.elastic.views` says which step counts in each case. The same all_reduce carries what
ranks must learn at one moment: that newcomers wait, and that the job is to end (`running`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from dure.checkpoint.objects import bare
from dure.elastic.snapshot import Snapshot, require_returnable
from dure.elastic.views import Progress
from dure.errors import UsageError

__all__ = ["Recovery", "State"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One change of the group, as a rank saw it.

    Attributes:
        epoch: Number of the new group.
        lost: How many ranks it has lost.
        joined: How many have come.
        step: The commit after which it continued.
        cause: The reason for the old group's end.
        agreement_s: Until the ranks agreed on the new group.
        group_s: Until it was made.
        state_s: Until all had the state.

    Obtained from:
        `State.recoveries`.
    """

    epoch: int
    lost: int
    joined: int
    step: int
    cause: str
    agreement_s: float
    group_s: float
    state_s: float

    @property
    def total_s(self) -> float:
        """From the failure until the program continued."""
        return self.agreement_s + self.group_s + self.state_s


class State:
    """What must not be lost when a rank dies.

    An attribute with `state_dict` and `load_state_dict` (a module, an optimizer, a scaler, a
    scheduler, a sampler, a `dure.data.DataLoader`, an averager) is a *part*; every other one is a
    *value*: numbers, strings, tensors, and lists, tuples, sets and dicts of them.

        state = dure.elastic.State(model=model, optimizer=optimizer, epoch=0)
        state.epoch += 1

    A part that belongs to one group (a loader of this rank's share, say) is made in `train`, again
    for each group: on being assigned it takes over the state that was committed under its name. A
    module in a wrapper (`DistributedDataParallel`) is kept without it.

    Args:
        **attributes: The first attributes.

    Raises:
        UsageError: One of them is a value that could not be put back after a failure.

    Threads:
        One at a time.

    Cost:
        Twice the memory of the state, on the devices where it lies.

    Example:
        ```python
        from dure import elastic

        state = elastic.State(model=torch.nn.Linear(2, 1), epoch=0)
        state.commit()
        state.epoch = 5
        state.restore()  # back to the commit
        assert state.epoch == 0
        ```
    """

    def __init__(self, **attributes: Any) -> None:
        self._parts: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._committed, self._staged = Snapshot(), Snapshot()
        self._agree: Callable[[int], None] | None = None
        self._calls = 0
        self.recoveries: list[Recovery] = []
        for name, value in attributes.items():
            setattr(self, name, value)
            if name in self._values:
                require_returnable(value, name)

    # ---- attributes ----------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in _OWN:
            object.__setattr__(self, name, value)
        elif _is_part(value):
            self._values.pop(name, None)
            self._parts[name] = value = bare(value)
            if self._committed.holds(name):
                _rejoin(value)
                self._committed.put_back(name, value, self._parts)
        else:
            self._parts.pop(name, None)
            self._values[name] = value

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            for kind in (self._parts, self._values):
                if name in kind:
                    return kind[name]
        raise AttributeError(f"the state has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        if self._parts.pop(name, self._values.pop(name, _ABSENT)) is _ABSENT:
            raise AttributeError(f"the state has no attribute {name!r}")

    # ---- commits -------------------------------------------------------------------------------

    @property
    def commits(self) -> int:
        """How many steps are committed; the same on all ranks."""
        return max(0, self._committed.step)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors in the committed copy."""
        return self._committed.nbytes

    def commit(self, every: int = 1) -> bool:
        """Make what is now the state to which ranks return after a failure.

        Between two commits ranks also learn here, all at the same step, that newcomers wait (a
        new group is made, and `train` is called again), and that the job is to end
        (`dure.elastic.on_preempt`).

        Args:
            every: Commit at each `every`-th call only. For states that take long to copy: the
                copy costs its time once in so many steps, and up to so many are done again.

        Returns:
            Whether this call committed.

        Raises:
            UsageError: Something in the state cannot be copied.
            Desync: The ranks are not at the same step.
            CommError: A rank is lost; let it leave `train`, and `run` continues with the others.

        Collective:
            All ranks call, each after the same step.

        Cost:
            One copy of the state, and an all_reduce of 32 bytes.
        """
        self._calls += 1
        if every > 1 and self._calls % every:
            return False
        step = self.commits + 1
        self._staged.take(self._parts, self._values, step)
        if self._agree is not None:
            self._agree(step)
        else:
            self.promote()
        return True

    def restore(self) -> None:
        """Put everything back to the last commit, in the same objects.

        Raises:
            UsageError: Nothing has been committed yet.
            CheckpointMismatch: A part is not of the kind that was committed under its name.
        """
        if self._committed.step < 0:
            raise UsageError(
                "there is nothing to go back to", op="restore", fix="Call commit() first."
            )
        self._calls = 0
        for name, part in self._parts.items():
            _rejoin(part)
            if self._committed.holds(name):
                self._committed.put_back(name, part, self._parts)
            if isinstance(part, nn.Module):  # gradients of a step that is not to be
                part.zero_grad(set_to_none=True)
        self._values = self._committed.values()
        self._committed.put_back_randomness()

    # ---- for `run` -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Commit what the program made, as step 0, on this rank alone."""
        self._staged.take(self._parts, self._values, 0)
        self.promote()

    def promote(self) -> None:
        """Make the staged snapshot the committed one."""
        self._committed, self._staged = self._staged, self._committed
        self._staged.step = -1

    def standing(self) -> Progress:
        return Progress(self._committed.step, self._staged.step)

    def settle(self, step: int) -> None:
        """Take the staged snapshot for the committed one, if it is that of `step`; drop it else."""
        if self._staged.step == step:
            self.promote()
        self._staged.step = -1

    @property
    def committed(self) -> Snapshot:
        """What is sent to others."""
        return self._committed

    @property
    def staged(self) -> Snapshot:
        """The snapshot that receives, until it is complete."""
        return self._staged

    def attach(self, agree: Callable[[int], None] | None) -> None:
        """Let `agree(step)` carry out the second phase of a commit; None: no rank has to agree."""
        self._agree = agree

    def detach_parts(self, names: set[str]) -> None:
        """Forget parts that `train` made: they belong to a group that is no more."""
        for name in set(self._parts) - names:
            del self._parts[name]

    @property
    def part_names(self) -> set[str]:
        return set(self._parts)


_OWN = frozenset({"recoveries"})
_ABSENT = object()


def _is_part(value: Any) -> bool:
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _rejoin(part: Any) -> None:
    """Let a sampler or loader take this rank's share in the present group."""
    rejoin = getattr(cast(object, part), "rejoin", None)
    if callable(rejoin):
        rejoin()
