"""To and from one file of `torch.save`, in this process alone, under torch's names."""

from __future__ import annotations

from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.reading import Mapped
from dure.checkpoint.saving import save_into
from dure.checkpoint.tree import decode
from dure.errors import CheckpointError

__all__ = ["dcp_to_torch_save", "torch_save_to_dcp"]


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | PathLike[str], torch_save_path: str | PathLike[str]
) -> None:
    """Write a checkpoint as one file of `torch.save`: whole tensors, nested as they were saved.

    Args:
        dcp_checkpoint_dir: The checkpoint; of Dure.
        torch_save_path: The file; replaced if it is there.

    Raises:
        CheckpointError: The checkpoint cannot be used, or is damaged.

    Cost: memory of the tensors that are saved in several slices; others are mapped.
    """
    folder = Path(dcp_checkpoint_dir)
    catalog = catalog_of(folder)
    state = decode(catalog.tree, cache(Mapped(folder, catalog).checked))
    torch.save(state, torch_save_path)


def torch_save_to_dcp(
    torch_save_path: str | PathLike[str], dcp_checkpoint_dir: str | PathLike[str]
) -> None:
    """Write a file of `torch.save` as a checkpoint, which any mesh loads.

    Args:
        torch_save_path: The file: nested dicts and lists of tensors and values.
        dcp_checkpoint_dir: The folder; made if absent.

    Raises:
        CheckpointError: The file would run code, or is none of torch.
        CheckpointException: Something in it cannot be saved, or not written.

    Cost: the file is mapped, and its bytes are read once.
    """
    try:
        state = torch.load(torch_save_path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as e:  # of many classes
        path = str(torch_save_path)
        raise CheckpointError("the file cannot be used", path=path, seen=f"{e}") from e
    if not isinstance(state, dict):
        seen = f"a {type(state).__name__}"
        raise CheckpointError("the file holds no dict", path=str(torch_save_path), seen=seen)
    folder = Path(dcp_checkpoint_dir)
    save_into(folder, cast(dict[str, Any], state), Ranks(None, alone=True))
