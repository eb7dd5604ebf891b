"""Dicts and lists that are loaded in place: their own tensors are filled, all else comes back."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from dure.checkpoint import Checkpointer, PerRank
from dure.errors import CheckpointError, DureError
from dure.tensor import Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
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


def test_a_dataclass_for_which_there_is_no_instance_is_loaded_as_a_dict_with_a_warning(
    tmp_path, caplog
):
    found = {"options": None, "items": [Options(0.0)]}
    put_through(tmp_path, {"options": Options(0.5), "items": [Options(0.1), Options(0.2)]}, found)
    assert found == {"options": {"decay": 0.5}, "items": [Options(0.1), {"decay": 0.2}]}
    assert type(found["options"]) is dict
    names = [message.split(" ")[0] for message in caplog.messages]
    assert names == ["options", "items.1"] and "decay" in caplog.messages[0]


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


@pytest.mark.parametrize("nested", [False, True])
def test_a_modules_state_has_the_names_of_the_file(tmp_path, nested):
    def state_of(net):
        return {"ema": net.state_dict()} if nested else net.state_dict()

    Checkpointer(tmp_path).save(1, it=state_of(nn.Sequential(nn.Linear(2, 2))))
    for other in (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential()):
        before = {k: v.clone() for k, v in other.state_dict().items()}
        with pytest.raises(CheckpointError):
            Checkpointer(tmp_path).load(it=state_of(other))
        assert equal(before, dict(other.state_dict()))


def test_one_tensor_in_two_places_that_were_saved_as_two_becomes_two(tmp_path):
    start, inner = torch.zeros(2), dict[str, Any]()
    found = {"sum": start, "squares": start, "a": inner, "b": inner}
    saved = {"sum": torch.ones(2), "squares": torch.full((2,), 4.0), "a": {"x": 1}, "b": {"x": 2}}
    put_through(tmp_path, saved, found)
    assert (found["sum"].tolist(), found["squares"].tolist()) == ([1, 1], [4, 4])
    assert (found["a"], found["b"]) == ({"x": 1}, {"x": 2})
    assert found["sum"] is start


def test_tensors_of_inference_and_of_training_are_filled(tmp_path):
    with torch.inference_mode():
        made = torch.zeros(2)
    weight = nn.Parameter(torch.zeros(2))
    doubled = (weight * weight).sum()
    put_through(tmp_path, [torch.ones(2), torch.ones(2)], [made, weight])
    assert (made.tolist(), weight.tolist()) == ([1, 1], [1, 1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        doubled.backward()


def _divided(rank: int, folder: Any, sharded: bool) -> tuple[bool, list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).view(5, 3)
    saved = [distribute_tensor(whole.clone(), mesh, [Shard(0)]), {"own": torch.ones(1)}]
    Checkpointer(folder, sharded=sharded).save(1, it=saved, mine=PerRank([torch.full((2,), rank)]))
    there = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(1)])
    part, own = there.to_local(), [torch.zeros(2, dtype=torch.int64)]
    found: Any = [there]
    Checkpointer(folder).load(it=found, mine=PerRank(own))
    assert found[0] is there and found[1]["own"].tolist() == [1]
    assert part.equal(whole[:, :2] if rank == 0 else whole[:, 2:])
    return found[0].full_tensor().equal(whole), own[0].tolist()


@pytest.mark.parametrize("sharded", [False, True])
def test_divided_tensors_are_filled_in_their_own_division(tmp_path, sharded):
    found = run_ranks(2, _divided, tmp_path, sharded)
    assert found == [(True, [0, 0]), (True, [1, 1])]
