"""Dicts and lists that are loaded in place: their own tensors are filled, all else comes back."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dure.checkpoint import Checkpointer
from dure.errors import CheckpointError, DureError
from tests.checkpoint.small_runs import equal, small


def put_through(folder, saved: Any, found: Any) -> None:
    Checkpointer(folder).save(1, it=saved)
    Checkpointer(folder).load(it=found)


@pytest.mark.parametrize(
    "state_of",
    [
        lambda net: net.state_dict(),
        lambda net: dict(net.state_dict()),
        lambda net: {"averaged": net.state_dict(), "decay": 0.5},
        lambda net: [*net.parameters(), *net.buffers()],
        lambda net: {"shadow": [(t, 1) for t in (*net.parameters(), *net.buffers())]},
    ],
    ids=["state_dict", "dict", "nested", "list", "tuples in a list"],
)
def test_a_module_is_filled_through_its_tensors(tmp_path, state_of):
    averaged, other = small(1), small(2)
    averaged[1].running_mean.fill_(3)
    averaged[1].num_batches_tracked.fill_(7)
    memory = [t.data_ptr() for t in other.state_dict().values()]
    put_through(tmp_path, state_of(averaged), state_of(other))
    assert equal(dict(averaged.state_dict()), dict(other.state_dict()))
    assert [t.data_ptr() for t in other.state_dict().values()] == memory
    assert not equal(dict(other.state_dict()), dict(small(2).state_dict()))


def test_containers_and_tensors_that_are_there_are_kept(tmp_path):
    inner, weight, items = {"old": 1}, torch.zeros(2), [torch.zeros(1), 5, 6]
    found = {"inner": inner, "weight": weight, "items": items, "gone": torch.ones(1)}
    saved = {
        "inner": OrderedDict(a=1, b=(torch.ones(1), None)),
        "weight": torch.tensor([3.0, 4.0]),
        "items": [torch.full((1,), 8.0), "x"],
        "new": torch.full((3,), 2.0),
    }
    first = items[0]
    put_through(tmp_path, saved, found)
    assert found["inner"] is inner and inner == {"a": 1, "b": (torch.ones(1), None)}
    assert found["weight"] is weight and weight.tolist() == [3, 4]
    assert found["items"] is items and items == [first, "x"] and first == 8.0
    assert list(found) == ["inner", "weight", "items", "new"] and found["new"].tolist() == [2] * 3


@dataclass
class Averages:
    decay: float
    shadow: list[torch.Tensor]


@dataclass(frozen=True)
class Options:
    decay: float


def test_dataclasses_in_a_dict_are_filled_if_they_have_the_fields_of_the_file(tmp_path):
    saved = Averages(0.9, [torch.ones(3)])
    Checkpointer(tmp_path).save(1, state={"a": saved, "b": saved, "o": Options(0.5)})
    one, options = Averages(0.0, [torch.zeros(3)]), Options(0.0)
    state, shadow = {"a": one, "b": one, "o": options}, one.shadow[0]
    Checkpointer(tmp_path).load(state=state)
    assert state["a"] is one and one.shadow[0] is shadow
    assert one.decay == state["b"].decay == 0.9 and shadow.tolist() == [1, 1, 1]
    assert state["o"] == Options(0.5) and options == Options(0.0)
    with pytest.raises(DureError, match=r"a.shadow is in the file only"):
        Checkpointer(tmp_path).load(state={**state, "a": Options(0.0)})


def test_a_tensor_without_elements_is_replaced_and_one_of_another_kind_refused(tmp_path):
    found: Any = {"history": torch.zeros(0), "none": None, "wide": torch.zeros(1).expand(3)}
    saved = {k: torch.tensor([1.0, 2.0, 3.0]) for k in found}
    put_through(tmp_path, saved, found)
    assert {k: v.tolist() for k, v in found.items()} == {k: [1, 2, 3] for k in saved}
    weight = torch.zeros(3)
    for other in (
        torch.zeros(2),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, device="meta"),
    ):
        with pytest.raises(DureError) as caught:
            Checkpointer(tmp_path).load(it={"history": weight, "wide": other})
        assert "wide" in caught.value.seen and weight.tolist() == [0, 0, 0]
    with pytest.raises(CheckpointError):
        Checkpointer(tmp_path).load(it=[weight])


def test_one_tensor_in_two_places_that_were_saved_as_two_becomes_two(tmp_path):
    start, inner = torch.zeros(2), dict[str, Any]()
    found = {"sum": start, "squares": start, "a": inner, "b": inner}
    saved = {"sum": torch.ones(2), "squares": torch.full((2,), 4.0), "a": {"x": 1}, "b": {"x": 2}}
    put_through(tmp_path, saved, found)
    assert (found["sum"].tolist(), found["squares"].tolist()) == ([1, 1], [4, 4])
    assert (found["a"], found["b"]) == ({"x": 1}, {"x": 2})
    assert found["sum"] is start
