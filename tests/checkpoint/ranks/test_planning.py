"""Who writes what: what is shared is written once, and plans are made once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dure.checkpoint import (
    Checkpointer,
    FileSystemReader,
    load,
    planning,
    save,
)
from dure.checkpoint.agreement import Ranks
from dure.checkpoint.saving import save_into, take
from dure.fsdp import fully_shard
from dure.tensor import DeviceMesh, DTensor, Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted, parts


def test_tied_tensors_are_written_once_and_loaded_by_each_name(tmp_path):
    weight = counted(3)
    save({"a": weight, "b": {"c": weight}, "d": weight[:2]}, checkpoint_id=tmp_path)
    (part,) = parts(tmp_path)
    assert sorted(part) == ["a", "d"]
    state = {"b": {"c": torch.zeros(3)}, "a": torch.zeros(3)}
    loaded = load(state, checkpoint_id=tmp_path)
    assert state["a"].tolist() == state["b"]["c"].tolist() == [0, 1, 2]
    assert loaded[:2] == ([], ["d"])
    held = FileSystemReader(tmp_path).read_metadata()
    assert sorted(held.state_dict_metadata) == ["a", "b.c", "d"]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])  # the last in the mesh has no rows
def test_tied_dtensors_are_written_once_also_where_a_rank_has_no_rows(tmp_path, order):
    def body(rank):
        mesh = DeviceMesh("cpu", order)
        rows, others = (distribute_tensor(counted(2, 3) + n, mesh, [Shard(0)]) for n in (0, 9))
        save({"a": rows, "b": {"c": rows.detach()}, "d": others}, checkpoint_id=tmp_path)
        state = {"a": torch.zeros(2, 3), "b": {"c": torch.zeros(2, 3)}, "d": torch.zeros(2, 3)}
        loaded = load(state, checkpoint_id=tmp_path)
        return state["a"].equal(counted(2, 3)), state["b"]["c"].equal(counted(2, 3)), loaded[:2]

    assert run_ranks(3, body) == [(True, True, ([], []))] * 3
    assert sorted(name[0] for part in parts(tmp_path) for name in part) == ["a", "a", "d", "d"]
    state = {"d": torch.zeros(2, 3)}
    load(state, checkpoint_id=tmp_path)
    assert state["d"].tolist() == [[9, 10, 11], [12, 13, 14]]


@pytest.mark.parametrize("sharded", [False, True])
def test_tied_weights_of_a_sharded_model_are_written_once_and_loaded(tmp_path, sharded):
    def model_of(scale):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        with torch.no_grad():
            model[1].weight.copy_(counted(5, 3) * scale)
        model[0].weight = model[1].weight
        return fully_shard(model)

    def body(rank):
        Checkpointer(tmp_path, sharded=sharded).save(1, model=model_of(1))
        model = model_of(0)
        assert Checkpointer(tmp_path).load(model=model) == 1
        return model[0].weight.full_tensor().equal(counted(5, 3)), model[0].weight is model[
            1
        ].weight

    assert run_ranks(2, body) == [(True, True)] * 2
    (folder,) = tmp_path.glob("*-step-1")
    assert sum(t.numel() for part in parts(folder) for t in part.values()) == 15


def test_views_of_one_dtensor_that_are_cut_otherwise_are_not_tied(tmp_path):
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        part = counted(2, 2) + 4 * rank
        state = {
            "rows": DTensor.from_local(part, mesh, [Shard(0)]),
            "columns": DTensor.from_local(part, mesh, [Shard(1)]),
        }
        save(state, checkpoint_id=tmp_path)

    run_ranks(2, body)
    state = {"rows": torch.zeros(4, 2), "columns": torch.zeros(2, 4)}
    load(state, checkpoint_id=tmp_path)
    assert state["rows"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert state["columns"].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_weights_that_are_tied_on_one_rank_only_are_those_of_the_lowest(tmp_path):
    def body(rank):
        weight = counted(3) + rank
        save({"a": weight, "b": weight.clone() if rank else weight}, checkpoint_id=tmp_path)

    run_ranks(2, body)
    assert [sorted(part) for part in parts(tmp_path)] == [["a"]]
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    load(state, checkpoint_id=tmp_path)
    assert state["a"].tolist() == state["b"].tolist() == [0, 1, 2]


def test_what_ranks_share_is_written_once_and_spread(tmp_path):
    def body(rank):
        save({f"w{i}": counted(4, 4) for i in range(4)}, checkpoint_id=tmp_path)

    run_ranks(2, body)
    first, second = parts(tmp_path)
    assert sorted([*first, *second]) == ["w0", "w1", "w2", "w3"]
    assert len(first) == len(second) == 2


def test_plans_are_made_once_for_states_that_are_alike(tmp_path, monkeypatch):
    made = []
    divide = planning.divide
    monkeypatch.setattr(planning, "divide", lambda *given: made.append(1) or divide(*given))

    known = []
    division = planning.Known.division

    def told(self, offers, *others):
        known.append(sum(offer is None for _, offer in offers))
        return division(self, offers, *others)

    monkeypatch.setattr(planning.Known, "division", told)

    def body(rank):
        for value in (1.0, 2.0, 3.0):
            save({"w": torch.full((2,), value), "step": value}, checkpoint_id=tmp_path)
        save({"v": torch.zeros(2)}, checkpoint_id=tmp_path / "other")
        state = {"w": torch.zeros(2), "step": 0}
        load(state, checkpoint_id=tmp_path)
        return state["w"].tolist(), state["step"]

    assert run_ranks(2, body) == [([3, 3], 3)] * 2
    assert len(made) == 2 * 2  # two states, two ranks
    assert sorted(known) == [0] * 4 + [2] * 4  # the second and third save sent digests only


class _Compared(dict[str, Any]):
    """A tree that counts how often it is compared."""

    count = 0

    def __eq__(self, other: object) -> bool:
        _Compared.count += 1
        return super().__eq__(other)


def test_trees_of_ranks_that_all_differ_are_compared_once_each(tmp_path):
    num_ranks = 10
    ranks = frozenset(range(num_ranks))

    def body(rank):
        taken = take({"model": {"w": torch.ones(2)}, f"own{rank}": rank}, ranks)
        taken = replace(taken, tree=_Compared(taken.tree))
        save_into(tmp_path, taken, Ranks(None, "save"))

    _Compared.count = 0
    run_ranks(num_ranks, body)
    assert 0 < _Compared.count <= num_ranks * 2 * num_ranks  # by each rank
    state = {f"own{rank}": -1 for rank in range(num_ranks)}
    load(state, checkpoint_id=tmp_path)
    assert list(state.values()) == list(range(num_ranks))
