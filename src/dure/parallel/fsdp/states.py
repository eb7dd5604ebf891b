"""The states of fully sharded training, and which of them may follow which.

Every change of a state goes through `changed`, which refuses a transition that the table does not
list: that would be a fault of Dure, reported where it happens, not as a wrong gradient later.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from dure.errors import InternalError

__all__ = [
    "SHARDED_TRANSITIONS",
    "TRAINING_TRANSITIONS",
    "ShardedState",
    "TrainingState",
    "changed",
]


class ShardedState(Enum):
    """What the modules of a group of parameters have; see `ParameterGroup`."""

    SHARDED = "sharded"
    """Modules have the shards. The unsharded parameters have no memory."""
    UNSHARDING = "unsharding"
    """The same, and an unshard has been started."""
    UNSHARDED = "unsharded"
    """Modules have the unsharded parameters."""
    SHARDED_RETAINED = "sharded, unsharded parameters retained"
    """Modules have the shards. The unsharded parameters keep their memory: a graph reads them."""


class TrainingState(Enum):
    """What a tree of sharded modules does; see `Tree`."""

    IDLE = "idle"
    """Between steps. A forward with gradients may have ended and wait for its backward."""
    UNSHARD = "unshard"
    """Between steps. The program has unsharded a module to look at its parameters."""
    FORWARD = "forward"
    """The forward of the outermost module runs."""
    BACKWARD = "backward"
    """A backward runs, in which forwards may be recomputed."""
    BACKWARD_IN_FORWARD = "backward in forward"
    """A backward runs that a forward has called."""


SHARDED_TRANSITIONS: Mapping[ShardedState, frozenset[ShardedState]] = {
    ShardedState.SHARDED: frozenset({ShardedState.UNSHARDING}),
    ShardedState.UNSHARDING: frozenset({ShardedState.UNSHARDED, ShardedState.SHARDED}),
    ShardedState.UNSHARDED: frozenset({ShardedState.SHARDED, ShardedState.SHARDED_RETAINED}),
    ShardedState.SHARDED_RETAINED: frozenset({ShardedState.UNSHARDED, ShardedState.SHARDED}),
}
"""The states that may follow each state of a group."""

TRAINING_TRANSITIONS: Mapping[TrainingState, frozenset[TrainingState]] = {
    TrainingState.IDLE: frozenset(
        {TrainingState.UNSHARD, TrainingState.FORWARD, TrainingState.BACKWARD}
    ),
    TrainingState.UNSHARD: frozenset({TrainingState.IDLE, TrainingState.BACKWARD}),
    TrainingState.FORWARD: frozenset({TrainingState.IDLE, TrainingState.BACKWARD_IN_FORWARD}),
    TrainingState.BACKWARD: frozenset({TrainingState.IDLE}),
    TrainingState.BACKWARD_IN_FORWARD: frozenset({TrainingState.FORWARD}),
}
"""The states that may follow each state of a tree."""


State = TypeVar("State", ShardedState, TrainingState)


def changed(old: State, new: State, table: Mapping[State, frozenset[State]], of: str) -> State:
    """Return the state `new`, which follows `old`.

    Args:
        old, new: States.
        table: The legal transitions.
        of: The module, for messages.

    Raises:
        InternalError: The table does not list the transition.
    """
    if new not in table[old]:
        raise InternalError(
            f"{type(old).__name__} cannot change from {old.name} to {new.name}",
            op="fully_shard",
            seen=f"module {of}",
        )
    return new
