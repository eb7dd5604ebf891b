"""The plug-in's operations in a profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_backend.torch_worlds import in_pool, td, world


def profiled(rank: int, folder: str) -> None:
    with world(rank, folder), torch.profiler.profile(record_shapes=True) as profile:
        td.all_reduce(torch.ones(2, 3))
        td.all_reduce(torch.ones(5), async_op=True).wait()
        out = [torch.empty(4), torch.empty(4)]
        td.all_gather(out, torch.ones(4))
        with pytest.raises(ValueError, match="list"):
            td.group.WORLD.allreduce([])
        if rank == 0:
            td.send(torch.ones(7), 1)
        else:
            td.recv(torch.empty(7))
    seen: Any = profile.events()
    events = [e for e in seen if e.name.startswith("dure:")]
    shapes = [(e.name, e.input_shapes) for e in sorted(events, key=lambda e: e.time_range.start)]
    assert all(e.is_async for e in events)
    twice = [e.name for e in seen if e.name.startswith(("shm:", "c10d::all"))]
    assert not twice  # the records of Dure's own groups
    assert shapes == [
        ("dure:all_reduce", [[2, 3]]),
        ("dure:all_reduce", [[5]]),
        ("dure:all_gather", [[4]]),
        ("dure:all_reduce", []),
        ("dure:send" if rank == 0 else "dure:recvAnySource", [[7]]),
    ]


test_profiled = in_pool(profiled)
