"""Operations of the plug-in: futures come at once, and data move without waiting."""

from __future__ import annotations

import torch

from tests.torch_backend.torch_worlds import in_pool, shared, td, world


def progress_without_waiting(rank: int, folder: str) -> None:
    with world(rank, folder) as group:
        notes = shared(group)
        large = torch.ones(1 << 22)
        if rank == 0:
            future = td.all_reduce(large, async_op=True).get_future()
            assert not future.done()
            notes.set("started", "yes")
            notes.wait(["finished"])  # rank 1 finishes although nobody here waits for the work
            assert future.wait()[0] is large or torch.equal(future.wait()[0], large)
        else:
            notes.wait(["started"])
            td.all_reduce(large)
            notes.set("finished", "yes")
        assert (large == 2).all()
        nested = td.all_reduce(torch.ones(1), async_op=True).get_future()
        outer = nested.then(
            lambda f: td.all_reduce(f.value()[0], async_op=True).get_future().wait()[0]
        )
        assert outer.wait().item() == 4


test_progress_without_waiting = in_pool(progress_without_waiting)


def coalescing(rank: int, folder: str) -> None:
    with world(rank, folder):
        a, b = torch.ones(2), torch.ones(3)
        with td.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
            td.all_reduce(a)
            td.all_reduce(b)
        gathered = torch.empty(4)
        with td.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            td.all_gather_into_tensor(gathered, torch.full((2,), float(rank)))
        manager.wait()
        part = torch.empty(1)
        with td.distributed_c10d._coalescing_manager():
            td.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0]))
        assert a.tolist() + b.tolist() == [2.0] * 5
        assert gathered.tolist() == [0, 0, 1, 1]
        assert part.item() == 2 * (rank + 1)
        td.all_reduce(a)
        assert a.tolist() == [4.0] * 2


test_coalescing = in_pool(coalescing)
