"""Works of the plug-in: their errors, and those that only C++ holds."""

from __future__ import annotations

import gc

import pytest
import torch

from dure.errors import PeerLost
from tests.torch_backend.torch_worlds import c10d, in_pool, shared, td, world


def dropped_works(rank: int, folder: str) -> None:
    with world(rank, folder) as group:
        notes = shared(group)
        tensor = torch.zeros(4)
        if rank == 0:
            work = td.irecv(tensor, 1)
            c10d._register_work(tensor, work)
            del work
            gc.collect()
            notes.set("dropped", "yes")
            torch.ops._c10d_functional.wait_tensor(tensor)
            assert tensor.tolist() == [1.0] * 4
        else:
            notes.wait(["dropped"])
            td.send(torch.ones(4), 0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        with model.join(divide_by_initial_world_size=False):  # the reducer holds forward's works
            for _ in range(1 + 2 * rank):
                model(torch.ones(1, 2)).sum().backward()


test_dropped_works = in_pool(dropped_works)


def errors_in_backward(rank: int, folder: str) -> None:
    with world(rank, folder):
        group = td.new_group([0, 1])
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(2, 2), process_group=group
        )
        loss = model(torch.ones(1, 2)).sum()
        if rank == 0:
            with pytest.raises(RuntimeError):
                loss.backward()
        else:
            td.destroy_process_group(group)


test_errors_in_backward = in_pool(errors_in_backward)


def errors_in_wait(rank: int, folder: str) -> None:
    with world(rank, folder):
        group = td.new_group([0, 1])
        if rank == 0:
            work = td.all_reduce(torch.ones(2), group=group, async_op=True)
            with pytest.raises(PeerLost) as raised:
                work.wait()
            assert raised.value.peer == 1
            assert isinstance(work.exception(), PeerLost)
            assert work.is_completed()
            assert not work.is_success()
            with pytest.raises(RuntimeError):
                work.get_future().wait()
        else:
            td.destroy_process_group(group)


test_errors_in_wait = in_pool(errors_in_wait)
