"""What a group is made of."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta

import pytest
import torch

import dure as dist
from dure.comm.world import current_world
from dure.errors import CopyError, Desync, UsageError
from tests.thread_ranks import on_ranks


@on_ranks(2)
def test_group_and_what_holds_one_refuse_to_be_copied_2_ranks(rank: int) -> None:
    group = dist.new_group([0, 1])
    holder = dist.SyncBatchNorm(2, process_group=group)
    for copies in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CopyError) as caught:
            copies(group)
        assert caught.value.group == group.group_name  # pyright: ignore
    with pytest.raises(CopyError):
        copy.deepcopy(holder)
    assert isinstance(group, dist.ProcessGroup)
    assert group.channel(1).size() == 2


@on_ranks(2)
def test_methods_of_torchs_groups_2_ranks(rank: int) -> None:
    group = dist.new_group([0, 1], group_desc="pair")
    assert isinstance(group, dist.ProcessGroup)
    assert (group.group_desc, group.bound_device_id) == ("pair", None)
    group.bound_device_id = torch.device("cpu")
    assert group.channel(1).bound_device_id == torch.device("cpu")
    default = current_world().need_default()
    assert default.group_desc == "default_pg"
    assert dist.new_group([0, 1]).group_desc == "undefined"  # pyright: ignore
    group.get_group_store().set(f"from {rank}", "")
    group.get_group_store().wait(["from 0", "from 1"])
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    work = group.allreduce([x := torch.tensor([float(rank)])], options)
    work.block_current_stream()
    assert x.item() == 1
    options.timeout = timedelta(seconds=5)
    with pytest.raises(UsageError, match=r"wait\(timeout\)"):
        group.allreduce([x], options)
    assert work.get_future_result().wait() == 0
    alone = group.split_group([rank])
    assert alone is not None
    assert alone.global_ranks == (rank,)
    late = torch.zeros(1)
    if rank == 1:
        work = group.irecv(late, 0)
        group.abort()
        assert work.get_future_result().wait() == 2
    dist.barrier()  # a receive from a rank that has left raises at once
    group.shutdown()
    with pytest.raises(UsageError):
        group.barrier()
    dist.destroy_process_group(group)
    dist.barrier()


@on_ranks(2)
def test_a_channel_is_a_view_of_its_group_2_ranks(rank: int) -> None:
    group = current_world().need_default()
    second = group.channel(1)
    assert group.channel(0) is group and second.channel(0) is group
    assert group.channel(1) is second and second.channel(1) is second
    assert (second.rank(), second.size()) == (group.rank(), group.size())
    x = torch.full((3,), float(rank))
    dist.all_reduce(x, group=second)
    assert x.tolist() == [1.0, 1.0, 1.0]
    assert (group.seq, second.seq) == (0, 1)
    with pytest.raises(UsageError):
        group.channel(2)
    with pytest.raises(Desync) as told:
        dist.all_reduce(torch.ones(2 + rank), group=second)
    assert told.value.group == second.group_name != group.group_name
