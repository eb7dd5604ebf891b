"""Programs of stock torch.distributed that run on "dure", one for each trap of such a plug-in.

Each is run by every rank of a pool as `fn(rank, folder)`. What is tried is told in the tests.
"""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from torch._C import _distributed_c10d
from torch.distributed import _functional_collectives as functional

import dure.torch_backend
from dure.errors import CommTimeout, DeviceError, PeerLost
from waiting import PATIENCE_S

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


# ---- 1: works that only C++ holds ----------------------------------------------------------------


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


# ---- 2 and 3: errors -----------------------------------------------------------------------------


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


# ---- 4: limits -----------------------------------------------------------------------------------


def limits_of_wait(rank: int, folder: str) -> None:
    with world(rank, folder) as group:
        notes = shared(group)
        if rank == 1:
            notes.wait(["waiting"])
            td.all_reduce(torch.ones(2))
        else:
            work = td.all_reduce(torch.ones(2), async_op=True)
            with pytest.raises(CommTimeout):
                work.wait(timedelta(milliseconds=20))
            waits = [
                threading.Thread(target=work.wait, args=limit)
                for limit in ((), (None,), (timedelta(0),), (timedelta(milliseconds=-1),))
            ]
            for thread in waits:
                thread.start()
            notes.set("waiting", "yes")
            for thread in waits:
                thread.join()
            assert work.is_success()
        options = td.AllreduceOptions()
        assert options.timeout < timedelta(0)
        assert group.allreduce([torch.ones(1)], options).wait()
        if rank == 0:
            with pytest.raises(CommTimeout):
                td.barrier(timeout=timedelta(milliseconds=20))
            notes.set("late", "yes")
        else:
            notes.wait(["late"])
            td.barrier()


# ---- 5 and 6: nothing blocks ---------------------------------------------------------------------


def sends_before_receives(rank: int, folder: str) -> None:
    with world(rank, folder):
        mine, theirs = torch.full((1 << 20,), float(rank)), torch.empty(1 << 20)
        batch = [td.P2POp(td.isend, mine, 1 - rank), td.P2POp(td.irecv, theirs, 1 - rank)]
        for work in td.batch_isend_irecv(batch):
            work.wait()
        assert (theirs == 1 - rank).all()
        from_anyone = torch.empty(1)
        if rank == 0:
            assert td.recv(from_anyone) == 1
        else:
            td.send(torch.ones(1), 0)


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


# ---- 7, 8 and 9: what torch looks up -------------------------------------------------------------


def identity(rank: int, folder: str) -> None:
    with world(rank, folder) as group:
        assert (group.rank(), group.size()) == (rank, 2)
        group.get_group_store().set(f"rank{rank}", "here")
        assert group.get_group_store().get(f"rank{1 - rank}") == b"here"
        named = td.new_group([0, 1], group_desc="a pair")
        assert named.group_desc == "a pair"
        assert named.group_name != group.group_name
        assert c10d._resolve_process_group(named.group_name) is named
        total = functional.all_reduce(torch.ones(3), "sum", named)
        assert total.tolist() == [2.0] * 3
        assert td.get_backend(named) == "dure"
        assert group._get_backend(torch.device("cpu")) is group
        assert group._device_types == [torch.device("cpu")]
        with pytest.raises(RuntimeError) as raised:
            group._get_backend(torch.device("cuda"))
        assert isinstance(raised.value, DeviceError)
        before = group._get_sequence_number_for_group()
        td.all_reduce(torch.ones(1))
        assert group._get_sequence_number_for_group() == before + 1


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


# ---- 10: torch.compile ---------------------------------------------------------------------------


def compiled(rank: int, folder: str) -> None:
    with world(rank, folder) as group:

        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            td.all_reduce(y)
            work = td.broadcast(y, 0, async_op=True)
            work.wait()
            return functional.all_reduce(y, "sum", group) + 1

        assert step(torch.ones(2)).tolist() == [9.0] * 2
        assert step(torch.ones(2)).tolist() == [9.0] * 2


# ---- 11: reductions and lists --------------------------------------------------------------------


def reductions(rank: int, folder: str) -> None:
    with world(rank, folder) as group:
        expected = {"SUM": 6, "AVG": 3, "PRODUCT": 8, "MIN": 2, "MAX": 4}
        for name, value in expected.items():
            tensor = torch.tensor([2.0 + 2 * rank])
            td.all_reduce(tensor, getattr(td.ReduceOp, name))
            assert tensor.item() == value, name
        for name, value in {"BAND": 2, "BOR": 7, "BXOR": 5}.items():
            whole = torch.tensor([3 if rank == 0 else 6])
            td.all_reduce(whole, getattr(td.ReduceOp, name))
            assert whole.item() == value, name
        scaled = torch.ones(1)
        td.all_reduce(scaled, td._make_nccl_premul_sum(0.5 + rank))
        assert scaled.item() == 2
        z = torch.tensor([1 + 2j])
        td.all_reduce(z)
        assert z.item() == 2 + 4j
        sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (2,))
        td.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [1.0, 1.0]
        strided = torch.ones(2, 3).t()
        td.all_reduce(strided)
        assert strided.tolist() == [[2.0] * 2] * 3
        with pytest.raises(ValueError, match="list of one"):
            group.allreduce([torch.ones(1), torch.ones(1)])


# ---- 12: the default -----------------------------------------------------------------------------


def default(rank: int, folder: str) -> None:
    backends = td.Backend.default_device_backend_map
    before = backends["cpu"]
    assert before == "gloo"
    dure.torch_backend.register()
    assert backends["cpu"] == "gloo"
    try:
        dure.torch_backend.make_default()
        with world(rank, folder, backend=None) as group:
            assert td.get_default_backend_for_device("cpu") == "dure"
            assert group.name() == "dure"
            td.barrier()
    finally:
        backends["cpu"] = before


# ---- 13: names and accelerators written into torch -----------------------------------------------


def beside_torch(rank: int, folder: str) -> None:
    td.set_debug_level(td.DebugLevel.DETAIL)
    try:
        with world(rank, folder) as group:
            td.barrier()
            with pytest.raises(ValueError, match="GLOO"):
                td.monitored_barrier()
            group.monitored_barrier(LIMIT)
            with pytest.raises(RuntimeError):
                td.split_group(group, [[0], [1]])
            alone = group.split_group([rank], group_name=f"alone{rank}")
            tensor = torch.ones(1)
            alone.allreduce([tensor]).wait()
            assert (alone.size(), tensor.item()) == (1, 1)
            swapped = group.split_group([1, 0])
            assert swapped.rank() == 1 - rank
            swapped.broadcast(tensor.fill_(rank), root=0).wait()
            assert tensor.item() == 1
            merged = group.merge_remote_group(shared(group), 2)
            merged.barrier().wait()
            for made in (alone, swapped, merged):
                made.shutdown()
    finally:
        td.set_debug_level(td.DebugLevel.OFF)
