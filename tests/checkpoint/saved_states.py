"""States whose elements are known: every whole tensor holds 0, 1, 2, ... in row-major order.

So what a rank must have after a load is known by index arithmetic alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dure.checkpoint import load, save
from dure.checkpoint.fsspec_path import FsspecPath
from dure.tensor import DTensor, Shard, distribute_tensor, init_device_mesh, zeros

Where = Path | FsspecPath
SHAPE = (7, 5)  # divides by none of the worlds


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return 0, 1, 2, ... in this shape."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def save_one(
    rank: int,
    folder: Where,
    sizes: Any,
    placements: Any,
    shape: tuple[int, ...] = SHAPE,
) -> None:
    """Save `w` on a mesh."""
    mesh = init_device_mesh("cpu", sizes)
    save({"w": distribute_tensor(counted(*shape), mesh, placements)}, checkpoint_id=folder)


def load_one(
    rank: int,
    folder: Where,
    sizes: Any,
    placements: Any,
    shape: tuple[int, ...] = SHAPE,
) -> tuple[int, int]:
    """Load `w` on a mesh, in place; return the bytes that were read, and those of the part."""
    mesh = init_device_mesh("cpu", sizes)
    state = {"w": zeros(*shape, device_mesh=mesh, placements=placements)}
    part = state["w"].to_local()
    wanted = distribute_tensor(counted(*shape), mesh, placements).to_local()
    loaded = load(state, checkpoint_id=folder)
    assert isinstance(state["w"], DTensor)
    assert part.equal(wanted), f"{part} is not {wanted}"  # the memory that was there
    return loaded.num_bytes, part.numel() * 4


WHOLE = torch.arange(28.0).view(7, 4)


def rows(whole: torch.Tensor, dim: int = 0) -> Any:
    """Return a tensor whose rows, or columns, are divided between 2 ranks."""
    return distribute_tensor(whole.clone(), init_device_mesh("cpu", (2,)), [Shard(dim)])


def parts(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return what is in the files of a checkpoint."""
    return [load_file(path) for path in sorted(folder.glob("part-*.safetensors"))]


def loaded(folder: Path, *shape: int) -> Any:
    """Load `w` in this process alone; return its elements."""
    state = {"w": torch.full(shape, -1.0)}
    load(state, checkpoint_id=folder, no_dist=True)
    return state["w"].tolist()
