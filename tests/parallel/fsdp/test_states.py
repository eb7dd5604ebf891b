"""Which states may follow which: the tables, written a second time by hand."""

from typing import Any

import pytest

from dure.errors import InternalError
from dure.parallel.fsdp.states import (
    SHARDED_TRANSITIONS,
    TRAINING_TRANSITIONS,
    ShardedState,
    TrainingState,
    changed,
)

LEGAL = {
    "SHARDED": "UNSHARDING",
    "UNSHARDING": "UNSHARDED SHARDED",
    "UNSHARDED": "SHARDED SHARDED_RETAINED",
    "SHARDED_RETAINED": "UNSHARDED SHARDED",
    "IDLE": "UNSHARD FORWARD BACKWARD",
    "UNSHARD": "IDLE BACKWARD",
    "FORWARD": "IDLE BACKWARD_IN_FORWARD",
    "BACKWARD": "IDLE",
    "BACKWARD_IN_FORWARD": "FORWARD",
}


@pytest.mark.parametrize(
    ("states", "table"),
    [(ShardedState, SHARDED_TRANSITIONS), (TrainingState, TRAINING_TRANSITIONS)],
    ids=["sharded", "training"],
)
def test_only_the_listed_transitions_are_legal(states: Any, table: Any) -> None:
    for old in states:
        for new in states:
            if new.name in LEGAL[old.name].split():
                assert changed(old, new, table, "encoder") is new
            else:
                with pytest.raises(
                    InternalError, match=rf"from {old.name} to {new.name}\b.*encoder"
                ):
                    changed(old, new, table, "encoder")
