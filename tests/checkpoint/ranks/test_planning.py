"""Tied tensors are written once, and loaded by each of their names."""

import pytest
import torch

from dure.checkpoint import FileSystemReader, load, save
from dure.tensor import DeviceMesh, Shard, distribute_tensor
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
