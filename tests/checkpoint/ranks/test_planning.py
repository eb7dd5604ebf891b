"""Who writes what: what is shared is written once, and plans are made once."""

from __future__ import annotations

import torch

from dure.checkpoint import (
    FileSystemReader,
    load,
    planning,
    save,
)
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
