"""A process group of torch's on gloo, beside the one of Dure that a rank has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as torch_dist

kept: list[object] = []
"""Torch's groups: callbacks of its hooks may be the last to hold one, on a thread of that group,
which then ends the process as it cannot wait for itself."""


@contextmanager
def torch_group(rank: int, size: int, path: str) -> Iterator[None]:
    """Let a block use torch's group, which its ranks find by a new file."""
    store = torch_dist.FileStore(path, size)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    kept.append(torch_dist.group.WORLD)
    try:
        yield
    finally:
        torch_dist.destroy_process_group()
