"""Copies of the state: in the same memory, of what comes back as what it was."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from enum import StrEnum

import pytest
import torch
from torch import nn

from dure.elastic import State
from dure.errors import UsageError


def test_a_commit_copies_into_the_same_memory_again():
    state = State(model=nn.Linear(64, 64))
    state.commit()
    state.commit()
    where = {state.committed.tensor("model.weight").data_ptr()}
    for _ in range(4):
        state.commit()
        where.add(state.committed.tensor("model.weight").data_ptr())
    assert len(where) == 2 and state.nbytes == 4 * (64 * 64 + 64)


@pytest.mark.parametrize("value", [object(), len, iter(()), [{"inner": print}]])
def test_what_cannot_be_committed_is_refused_by_name(value: object):
    with pytest.raises(UsageError, match="thing") as caught:
        State(thing=value)
    assert "checkpoint" not in str(caught.value)
    state = State()
    state.thing = value
    with pytest.raises(UsageError, match="thing"):
        state.commit()


class Phase(StrEnum):
    WARMUP = "warmup"


@pytest.mark.parametrize(
    "value",
    [
        defaultdict(int, a=1),
        [{"inner": defaultdict(list)}],
        Phase.WARMUP,
        bytearray(b"x"),
        torch.ones(2, requires_grad=True),
        nn.Parameter(torch.ones(2)),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_at_once(value: object):
    with pytest.raises(UsageError, match="thing"):
        State(thing=value).commit()


@pytest.mark.parametrize("value", [Counter(a=2), OrderedDict(a=1), {3: (None, 1j)}, "text", b"x"])
def test_values_come_back_as_what_they_were(value: object):
    state = State(thing=value)
    state.commit()
    state.restore()
    assert state.thing == value and type(state.thing) is type(value)


def test_a_computed_tensor_is_a_value():
    state = State(loss=nn.Parameter(torch.ones(2)).sum())
    state.commit()
    state.restore()
    assert state.loss.item() == 2 and not state.loss.requires_grad
