"""The state of an optimizer, loaded in the sharding of the model, under torch's old name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dure.checkpoint.metadata import TensorStorageMetadata
from dure.checkpoint.planned import nested
from dure.checkpoint.planner import LoadPlanner
from dure.checkpoint.sharded import load_state_dict
from dure.checkpoint.storage import StorageReader
from dure.tensor import DTensor

__all__ = ["load_sharded_optimizer_state_dict"]


def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:
    """Load what was saved under `optimizer_key`, before an optimizer has that state.

    Args:
        model_state_dict: Parameters by name. State of a parameter's shape gets its mesh and
            placements; other tensors are full.
        optimizer_key: The key of the state, which is by names, as `get_state_dict` has it.
        storage_reader: Where the checkpoint is.
        planner: As for `load`.

    Returns:
        {optimizer_key: the state}, nested as it was.

    Raises:
        CheckpointException: It cannot be loaded.

    Collective:
        All ranks; as `load`.

    Example:
        ```python
        from dure import checkpoint
        from dure.checkpoint.state_dict import get_optimizer_state_dict

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        state = {"optim": get_optimizer_state_dict(model, optimizer)}
        checkpoint.save(state, checkpoint_id="optim")
        found = checkpoint.load_sharded_optimizer_state_dict(
            model.state_dict(), "optim", checkpoint.FileSystemReader("optim")
        )
        assert found["optim"]["param_groups"][0]["lr"] == 0.1
        ```
    """
    metadata = storage_reader.read_metadata()
    leaves: dict[str, Any] = {}
    for name, saved in metadata.state_dict_metadata.items():
        path = metadata.planner_data.get(name, (name,))
        if path[0] != optimizer_key:
            continue
        value: Any = None
        if isinstance(saved, TensorStorageMetadata):
            value = torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
            parameter = model_state_dict.get(path[2]) if len(path) > 2 else None
            if isinstance(parameter, DTensor) and parameter.shape == saved.size:
                value = torch.empty_like(parameter, dtype=saved.properties.dtype)
        leaves[name] = value
    made = nested(leaves, metadata.planner_data)
    load_state_dict(made, storage_reader, planner=planner)
    return made
