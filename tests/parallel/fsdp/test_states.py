"""A transition that the tables of states do not list is a fault of Dure, and is reported as one."""

import pytest

from dure.errors import InternalError
from dure.parallel.fsdp.states import SHARDED_TRANSITIONS, TRAINING_TRANSITIONS, changed
from dure.parallel.fsdp.states import ShardedState as Sharded
from dure.parallel.fsdp.states import TrainingState as Training


@pytest.mark.parametrize(
    ("old", "new", "table"),
    [
        (Sharded.SHARDED, Sharded.UNSHARDED, SHARDED_TRANSITIONS),
        (Training.BACKWARD, Training.FORWARD, TRAINING_TRANSITIONS),
    ],
)
def test_a_transition_that_is_not_listed_names_both_states_and_the_module(old, new, table):
    with pytest.raises(InternalError, match=rf"from {old.name} to {new.name}\b.*encoder"):
        changed(old, new, table, "encoder")
