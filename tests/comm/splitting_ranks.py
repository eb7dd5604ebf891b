"""What ranks do in the tests of communicators that are split off, on the simulated NCCL."""

from __future__ import annotations

import os
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch

import dure as dist
from dure.comm import creation
from dure.device_mesh import init_device_mesh
from dure.errors import CommTimeout, DureError
from dure.testing import accelerator
from dure.testing.accelerator.nccl import SimulatedNCCL
from tests.testing.accelerator.simulated_ranks import BACKEND, late

LIMIT = timedelta(seconds=40)
NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER


def run(names: list[str]) -> dict[str, str]:
    """Run the cases below on this rank, which is bound to its device; return its errors."""
    from tests.comm import splitting_ranks

    errors: dict[str, str] = {}
    accelerator.install()
    for name in names:
        bound = None if "without_a_device" in name and os.environ["RANK"] == "1" else "sim:0"
        bound = "cpu" if "bound_to_the_cpu" in name else bound
        backend = BACKEND.split(",")[1] if "without_cpu_tensors" in name else BACKEND
        device = None if bound is None else torch.device(bound)
        SimulatedNCCL.num_bootstraps = 0
        dist.init_process_group(backend, timeout=LIMIT, device_id=device)
        try:
            getattr(splitting_ranks, f"case_{name}")(dist.get_rank())
            errors[name] = ""
        except BaseException:
            errors[name] = traceback.format_exc()
        dist.destroy_process_group()
    return errors


def _engine(group: Any = None) -> Any:
    return (group or dist.group.WORLD)._backends["sim"]._engine._engine


def _sum(group: Any, value: float) -> list[float]:
    t = late(value)
    dist.all_reduce(t, group=group)
    return t.tolist()


def case_a_group_of_some_ranks(rank: int) -> None:
    """Rank 2 takes part without a color. The world's communicator is the only bootstrap."""
    pair = dist.new_group([0, 1])
    assert _engine().comm_split_count() == 1
    if rank < 2:
        assert set(_engine(pair)._communicators) == {"all"}
        assert _sum(pair, rank + 1.0) == [3.0] * 3
    else:
        assert pair is NON_MEMBER
    assert _sum(None, rank + 1.0) == [6.0] * 3
    assert SimulatedNCCL.num_bootstraps == 1


def case_ranks_that_are_bound_to_the_cpu(rank: int) -> None:
    """It is no device of the backend, so nothing is made in advance, and nothing is split."""
    assert _engine()._communicators == {}
    dist.new_group([0, 1])
    assert _engine().comm_split_count() == 0
    assert _sum(None, rank + 1.0) == [6.0] * 3


def case_keys_of_earlier_splits_are_removed(rank: int) -> None:
    """Those of the last one stay: a count, a verdict, and one of each rank."""
    for _ in range(3):
        dist.new_group([0, 1])
    dist.all_gather_object([None] * dist.get_world_size(), rank)
    keys = [k for k in _engine()._store._store.list_keys() if k.startswith("split/3/0/")]
    before = [k for k in _engine()._store._store.list_keys() if "verdict" in k and "split" in k]
    assert (len(keys), before) == (2 + dist.get_world_size(), ["split/3/0/verdict"])


def case_a_group_without_cpu_tensors(rank: int) -> None:
    pair = dist.new_group([1, 2])
    assert _engine().comm_split_count() == 1
    if rank:
        assert _sum(pair, rank + 1.0) == [5.0] * 3
    assert SimulatedNCCL.num_bootstraps == 1


def case_a_batch_of_some_ranks_comes_first(rank: int) -> None:
    """It uses the communicator of all ranks, which is there since `init_process_group`."""
    assert set(_engine()._communicators) == {"all"}
    if rank < 2:
        sent, received = late(rank + 1.0), torch.zeros(3, device="sim")
        ops = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert received.tolist() == [2.0 - rank] * 3
    if rank == 1:
        dist.send(late(7.0), 2)
    if rank == 2:
        received = torch.zeros(3, device="sim")
        dist.recv(received, 1)
        assert received.tolist() == [7.0] * 3


def case_operations_of_the_parent_end_before(rank: int) -> None:
    """NCCL allows none; the simulated one raises."""
    t = late(rank + 1.0)
    work = dist.all_reduce(t, async_op=True)
    pair = dist.new_group([0, 2])
    assert work is not None
    work.wait()
    assert t.tolist() == [6.0] * 3
    if rank != 1:
        assert _sum(pair, rank + 1.0) == [4.0] * 3
    assert _engine().comm_split_count() == 1


def case_members_in_another_order(rank: int) -> None:
    turned = dist.new_group([2, 0], sort_ranks=False)
    assert _engine().comm_split_count() == 1
    if rank != 1:
        gathered = torch.empty(2, device="sim")
        dist.all_gather_single(gathered, late(rank + 1.0, 1), group=turned)
        assert gathered.tolist() == [3.0, 1.0]


def case_messages_of_a_group_that_was_split_off(rank: int) -> None:
    """Of two ranks as always: in a communicator of theirs, in the order of their calls."""
    group = dist.new_group([0, 1, 2])
    if rank == 2:
        return
    t = late(rank + 1.0)
    (dist.isend(t, 1, group=group) if rank == 0 else dist.irecv(t, 0, group=group)).wait()
    assert t.tolist() == [1.0] * 3
    assert set(_engine(group)._communicators) == {"all", "0:1"}


def case_one_rank_without_a_device(rank: int) -> None:
    """Then no rank splits: it could be on another device than the others think."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        assert _sum(pair, rank + 1.0) == [3.0] * 3
    assert _engine().comm_split_count() == 0


def case_one_rank_with_another_device(rank: int) -> None:
    other = torch.device("sim", 1) if rank == 0 else None
    pair = dist.new_group([0, 1], device_id=other)
    if rank < 2:
        assert _sum(pair, rank + 1.0) == [3.0] * 3
    assert _engine().comm_split_count() == 0


def case_a_group_of_another_backend(rank: int) -> None:
    pair = dist.new_group([0, 1], backend="cpu:shm")
    if rank < 2:
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=pair)
        assert total.item() == 3.0
    assert _engine().comm_split_count() == 0


def case_split_group_of_all_ranks(rank: int) -> None:
    own = dist.split_group(split_ranks=[[0, 2], [1]])
    assert own is not None
    assert _engine().comm_split_count() == 1
    assert _sum(own, rank + 1.0) == [[4.0, 2.0, 4.0][rank]] * 3


def case_split_group_of_some_ranks(rank: int) -> None:
    """The others do not call, so nothing can be split."""
    if rank == 1:
        return
    own = dist.split_group(split_ranks=[[0, 2]])
    assert _sum(own, rank + 1.0) == [4.0] * 3
    assert _engine().comm_split_count() == 0


def case_a_rank_that_fails_to_make_its_group(rank: int) -> None:
    """The others do not wait for it in a split, and can use the world."""
    if rank == 0:

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(creation._GroupCreation, "connect", fail)
            with pytest.raises(ZeroDivisionError):
                dist.new_group([0, 1])
    elif rank == 1:
        with suppress(DureError):  # unless its part was made before it could know
            dist.new_group([0, 1])
    else:
        dist.new_group([0, 1])
    assert _engine().comm_split_count() == 0
    assert _sum(None, rank + 1.0) == [6.0] * 3


def case_a_rank_that_makes_no_group_without_cpu_tensors(rank: int) -> None:
    """Members have their group when time is up, with a communicator of their own."""
    if rank == 2:
        return
    began = time.monotonic()
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    assert time.monotonic() - began < 30
    assert _sum(pair, rank + 1.0) == [3.0] * 3
    assert _engine().comm_split_count() == 0


def case_a_late_rank_in_the_barrier(rank: int) -> None:
    """It has come to the meeting; the error names it, and the parent is broken."""
    world: Any = dist.group.WORLD
    part = world._backends["sim"]
    part.set_timeout(timedelta(seconds=1))
    if rank == 2:
        part.run = lambda *_: world.store.wait(["raised/0", "raised/1"])
        with pytest.raises(DureError):  # of its own part in a split that does not take place
            dist.new_group([0, 1])
        return
    with pytest.raises(CommTimeout) as caught:
        dist.new_group([0, 1])
    assert caught.value.missing == (2,)
    world.store.set(f"raised/{rank}", "")


def case_of_4_a_mesh_of_two_axes(rank: int) -> None:
    """One split for the groups of an axis."""
    mesh = init_device_mesh("sim", (2, 2), mesh_dim_names=("rows", "columns"))
    assert _sum(mesh.get_group("rows"), rank + 1.0) == [[4.0, 6.0][rank % 2]] * 3
    assert _sum(mesh.get_group("columns"), rank + 1.0) == [[3.0, 7.0][rank // 2]] * 3
    assert _engine().comm_split_count() == 2
    assert SimulatedNCCL.num_bootstraps == 1


def case_of_4_a_group_of_a_group(rank: int) -> None:
    """What was split off can be split."""
    outer = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    inner = dist.split_group(outer, [[1], [0]])
    third = dist.split_group(outer, [[0, 1]])
    assert (inner is not None and inner.size()) == 1
    assert _sum(third, rank + 1.0) == [[3.0, 7.0][rank // 2]] * 3
    assert (_engine().comm_split_count(), _engine(outer).comm_split_count()) == (1, 1)
