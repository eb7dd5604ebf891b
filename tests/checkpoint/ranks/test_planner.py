"""Custom planners, and readers of other files, on two ranks."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dure.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    QuantizedHuggingFaceStorageReader,
    async_save,
    load,
    load_sharded_optimizer_state_dict,
    save,
    save_state_dict,
)
from dure.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from dure.checkpoint.planner import WriteItemType
from dure.tensor import DTensor, Shard
from dure.testing import run_ranks
from tests.checkpoint.saved_states import WHOLE, rows
from tests.thread_ranks import on_ranks


class HalfOfTheWeights(DefaultSavePlanner):
    """Leaves out what begins with an underscore, and saves in 16 bits."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        kept = {k: v for k, v in state_dict.items() if not k.startswith("_")}
        super().set_up_planner(kept, storage_meta, is_coordinator)

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def transform_object(self, write_item, object):
        made = super().transform_object(write_item, object)
        return made if write_item.type == WriteItemType.BYTE_IO else made * 2


class Renamed(DefaultLoadPlanner):
    """The state has other names than the checkpoint, and half its values."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
        renamed = {name.replace("new", "old"): value for name, value in state_dict.items()}
        super().set_up_planner(renamed, metadata, is_coordinator)
        self.given = state_dict

    def load_bytes(self, read_item, value):
        super().load_bytes(read_item, value)
        name = read_item.dest_index.fqn
        self.given[name.replace("old", "new")] = self.original_state_dict[name]

    def commit_tensor(self, read_item, tensor):
        tensor /= 2


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_names_dtypes_and_values_are_the_planners(rank, tmp_path, background):
    state = {
        "old_w": rows(WHOLE),
        "old_b": torch.ones(2),
        "old_step": 3,
        "_left": torch.ones(9),
    }
    if background:
        future = async_save(state, checkpoint_id=tmp_path, planner=HalfOfTheWeights())
        state["old_w"].part.zero_()
        held = future.result()
    else:
        held = save(state, checkpoint_id=tmp_path, planner=HalfOfTheWeights())
    assert held.state_dict_metadata.keys() == {"old_w", "old_b", "old_step"}
    assert held.state_dict_metadata["old_w"].properties.dtype == torch.float16
    into: dict[str, Any] = {
        "new_w": rows(torch.zeros(7, 4), 1),
        "new_b": torch.zeros(2),
        "new_step": 0,
    }
    load(into, checkpoint_id=tmp_path, planner=Renamed())
    assert torch.equal(into["new_w"].full_tensor(), WHOLE)
    assert into["new_b"].tolist() == [1, 1] and into["new_step"] == 3
    plain: dict[str, Any] = {"old_w": torch.zeros(7, 4), "old_step": 0}
    load(plain, checkpoint_id=tmp_path)
    assert torch.equal(plain["old_w"], WHOLE * 2) and plain["old_step"] == 3


class Color(StrEnum):
    """Not a type that is read back without running code."""

    RED = "red"


def test_a_value_that_a_planner_cannot_read_back_is_refused_by_name(tmp_path):
    class Own(DefaultSavePlanner):
        pass

    with pytest.raises(CheckpointException, match=r"'a\.color'.*Color"):
        save({"a": {"color": Color.RED}}, checkpoint_id=tmp_path, planner=Own())
    assert not list(tmp_path.rglob("manifest.json"))


def test_weights_scaled_in_blocks_are_multiplied_on_the_way(tmp_path):
    weight = (torch.arange(35.0).view(5, 7) / 8).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])  # blocks of 3 x 3
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales, "b": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = weight.float()
    for i in range(5):
        for j in range(7):
            wanted[i, j] *= scales[i // 3, j // 3]

    def body(rank):
        for dim in (0, 1):
            into: dict[str, Any] = {"a.weight": rows(torch.zeros(5, 7), dim), "b": torch.zeros(3)}
            reader = QuantizedHuggingFaceStorageReader(tmp_path, block_size=3)
            load(into, storage_reader=reader)
            assert torch.equal(into["a.weight"].full_tensor(), wanted)
            assert into["b"].tolist() == [1, 1, 1]
        with pytest.raises(CheckpointException, match="blocks of 128"):
            load(into, storage_reader=QuantizedHuggingFaceStorageReader(tmp_path))

    run_ranks(2, body)


def test_one_rank_reads_a_file_of_torch_save_for_all(tmp_path):
    torch.save({"m": {"w": WHOLE, "one": torch.ones(1, 2)}}, tmp_path / "file.pt")

    def body(rank):
        state: dict[str, Any] = {
            "m": {"w": rows(torch.zeros(7, 4)), "one": rows(torch.zeros(1, 2))}
        }
        options: Any = {"storage_reader": BroadcastingTorchSaveReader()}
        load(state, checkpoint_id=tmp_path / "file.pt", planner=DynamicMetaLoadPlanner(), **options)
        assert torch.equal(state["m"]["w"].full_tensor(), WHOLE)
        assert state["m"]["one"].full_tensor().tolist() == [[1, 1]]
        state["other"] = {"w": torch.zeros(1)}
        with pytest.raises(CheckpointException, match=r"other\.w"):
            load(
                state,
                checkpoint_id=tmp_path / "file.pt",
                planner=DynamicMetaLoadPlanner(),
                **options,
            )

    run_ranks(2, body)


@on_ranks(2)
def test_optimizer_state_is_loaded_as_the_model_is_sharded(rank, tmp_path):
    of_w = {"step": torch.tensor(3.0), "exp_avg": rows(WHOLE)}
    saved = {"optim": {"state": {"w": of_w}, "param_groups": [{"lr": 0.5, "params": ["w"]}]}}
    save_state_dict(saved | {"model": {"w": rows(WHOLE)}}, FileSystemWriter(tmp_path))
    model = {"w": rows(torch.zeros(7, 4), 1)}
    found: Any = load_sharded_optimizer_state_dict(model, "optim", FileSystemReader(tmp_path))
    moment = found["optim"]["state"]["w"]["exp_avg"]
    assert isinstance(moment, DTensor) and moment.placements == (Shard(1),)
    assert torch.equal(moment.full_tensor(), WHOLE)
    assert found["optim"]["state"]["w"]["step"].item() == 3
    assert found.keys() == {"optim"}
