"""The default planners as functions, over a state of one process."""

from __future__ import annotations

import pytest
import torch

from dure.checkpoint.default_plans import (
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
    find_state_dict_object,
    find_tensor_shard,
)
from dure.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from dure.errors import CheckpointMismatch, UsageError

STATE = {"w": torch.arange(6.0).view(3, 2), "n": 7}


def _chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def test_plans_of_a_state_and_of_what_is_saved():
    plan = create_default_local_save_plan(dict(STATE), True)
    (plan,), metadata = create_default_global_save_plan([plan])
    assert [item.index.fqn for item in plan.items] == ["w", "n"]
    saved = metadata.state_dict_metadata["w"]
    assert isinstance(saved, TensorStorageMetadata)
    assert (saved.size, saved.chunks) == ((3, 2), [_chunk([0, 0], [3, 2])])
    load_plan = create_default_local_load_plan(dict(STATE), metadata)
    assert create_default_global_load_plan([load_plan]) == [load_plan]
    assert [item.storage_index.fqn for item in load_plan.items] == ["w", "n"]
    more = {**STATE, "new": torch.ones(1)}
    with pytest.raises(CheckpointMismatch):
        create_default_local_load_plan(more, metadata)
    assert create_default_local_load_plan(more, metadata, strict=False) == load_plan


def test_objects_of_a_state_are_found_by_index():
    assert find_state_dict_object(STATE, MetadataIndex("n")) == 7
    whole = MetadataIndex("w", torch.Size([0, 0]))
    assert find_state_dict_object(STATE, whole).equal(STATE["w"])
    for index in (MetadataIndex("x"), MetadataIndex("w", torch.Size([1, 0]))):
        with pytest.raises(UsageError):
            find_state_dict_object(STATE, index)
    assert find_tensor_shard(STATE["w"], MetadataIndex("w")).equal(STATE["w"])
