"""Worlds of stock torch.distributed on "dure", in the ranks of a pool."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch._C import _distributed_c10d

import dure.torch_backend  # noqa: F401 (registers the backend)
from dure.testing import ProcessPool
from tests.waiting import PATIENCE_S

td: Any = torch.distributed  # its annotations know neither our objects nor half of its own
c10d: Any = _distributed_c10d
LIMIT = timedelta(seconds=PATIENCE_S)
_numbers = itertools.count()


@contextmanager
def world(rank: int, folder: str, backend: str | None = "dure") -> Iterator[Any]:
    """Be rank `rank` of 2 in a torch.distributed world of its own."""
    store = td.FileStore(f"{folder}/store{next(_numbers)}", 2)
    td.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=LIMIT)
    try:
        yield td.group.WORLD
    finally:
        if td.is_initialized():
            td.destroy_process_group()


def shared(group: Any) -> Any:
    """Return a store in which the ranks can leave each other notes."""
    return td.PrefixStore("notes", group.get_group_store())


def in_pool(program: Callable[[int, str], None]) -> Callable[..., None]:
    """Make a test of a program `fn(rank, folder)` that 2 ranks of a pool run."""

    def test(process_pool: Callable[..., ProcessPool], tmp_path: Path) -> None:
        process_pool(2, "shm").run(program, str(tmp_path))

    return test
