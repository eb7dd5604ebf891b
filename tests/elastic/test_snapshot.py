"""Copies of the state: in the same memory, of what comes back as what it was."""

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

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


class Phase(StrEnum):
    WARMUP = "warmup"


@dataclass
class Best:
    loss: float = 1.0


@pytest.mark.parametrize(
    "value",
    [
        object(),
        [{"inner": print}],
        defaultdict(int, a=1),
        [{"inner": defaultdict(list)}],
        Phase.WARMUP,
        bytearray(b"x"),
        Best(),
        {"best": [Best()]},
        torch.ones(2, requires_grad=True),
        nn.Parameter(torch.ones(2)),
    ],
)
def test_what_would_come_back_as_something_else_is_refused_at_once(value: object):
    with pytest.raises(UsageError, match="thing"):
        State(thing=value)
    state = State()
    state.thing = value
    with pytest.raises(UsageError, match="thing"):
        state.commit()


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


class ExtraState(nn.Module):
    """Keeps what `set_extra_state` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.sums = {"a": [torch.zeros(2)]}

    def get_extra_state(self) -> Any:
        return self.sums

    def set_extra_state(self, state: Any) -> None:
        self.sums = state

    def total(self) -> torch.Tensor:
        return self.sums["a"][0]


class KeepsInHook(nn.Module):
    """Keeps what a hook before loading is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(2))
        self.kept = torch.zeros(2)
        self.register_load_state_dict_pre_hook(self.keep)

    def keep(self, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        self.kept = state[f"{prefix}sum"]

    def total(self) -> torch.Tensor:
        return self.kept


class KeepsInLoad(KeepsInHook):
    """Keeps what its own way to load is given."""

    def keep(self, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        pass

    def _load_from_state_dict(self, state: Any, prefix: str, *_: Any) -> None:
        self.kept = state[f"{prefix}sum"]


class PlainObject:
    def __init__(self) -> None:
        self.sum = torch.zeros(2)

    def state_dict(self) -> Any:
        return {"sum": self.sum}

    def load_state_dict(self, state: Any) -> None:
        self.sum = state["sum"]

    def total(self) -> torch.Tensor:
        return self.sum


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(
    "kind",
    [ExtraState, KeepsInHook, KeepsInLoad, PlainObject],
)
def test_part_that_keeps_what_it_is_given_does_not_change_the_commit(kind: Any, within: bool):
    part = kind()
    whole = nn.Sequential(part) if within and kind is not PlainObject else part
    state = State(part=whole, step=0)
    state.commit()
    for _ in range(3):
        state.restore()
        assert part.total().tolist() == [0, 0]
        with torch.no_grad():
            part.total().add_(1)  # of a step that will be undone
