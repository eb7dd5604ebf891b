"""What else stock torch.distributed does on "dure", beside the traps of `torch_ranks`.

Each is run by every rank of a pool as `fn(rank, folder)`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

import dure.torch_backend
from dure.errors import CommTimeout, Desync
from procs.torch_ranks import LIMIT, shared, td, world


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
    assert shapes == [
        ("dure:all_reduce", [[2, 3]]),
        ("dure:all_reduce", [[5]]),
        ("dure:all_gather", [[4]]),
        ("dure:all_reduce", []),
        ("dure:send" if rank == 0 else "dure:recvAnySource", [[7]]),
    ]


def unequal_calls(rank: int, folder: str) -> None:
    with world(rank, folder):
        tensor = torch.ones(2 + rank)
        with pytest.raises(Desync) as raised:
            td.all_reduce(tensor)
        assert set(raised.value.calls) == {0, 1}
        assert (tensor == 1).all()


def left_without_a_word(rank: int, folder: str) -> None:
    with world(rank, folder) as group:
        pair = td.new_group([0, 1])
        backend = pair._get_backend(torch.device("cpu"))
        backend._set_default_timeout(timedelta(seconds=0.2))
        assert backend.options._timeout == timedelta(seconds=0.2)
        if rank == 0:
            with pytest.raises(CommTimeout) as raised:
                td.all_reduce(torch.ones(1), group=pair)
            assert raised.value.missing == (1,)
            shared(group).set("over", "yes")
        else:
            shared(group).wait(["over"])
        pair.abort()
        td.all_reduce(torch.ones(1))


def experimental_api(rank: int, folder: str) -> None:
    del folder
    dure.torch_backend.register_dist2()
    dure.torch_backend.register_dist2()
    from torch.distributed import _dist2

    store = td.HashStore()
    group = _dist2._BACKENDS["dure"](store, 0, 1, LIMIT, torch.device("cpu"))
    try:
        tensor = torch.full((2,), float(rank))
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [float(rank)] * 2
    finally:
        group.shutdown()


def over_hosts(rank: int, folder: str) -> None:
    """Two ranks that pretend to be on two hosts."""
    with world(rank, folder) as group:
        assert group.ours.backend_name == "hybrid"
        for count in (3, 300_000):
            tensor = torch.full((count,), float(rank))
            td.all_reduce(tensor)
            assert tensor[-1].item() == 1.0
        sent, got = torch.full((5,), float(rank)), torch.empty(5)
        work = td.isend(sent, 1 - rank)
        td.recv(got, 1 - rank)
        work.wait()
        assert got.tolist() == [float(1 - rank)] * 5
        td.barrier()
