"""Rank, store and names of the plug-in's groups, and what torch's Python keeps for Gloo."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import _functional_collectives as functional

from dure.errors import DeviceError
from tests.torch_backend.torch_worlds import LIMIT, c10d, in_pool, shared, td, world


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
        kinds = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
        assert [device.type for device in group._device_types] == kinds
        with pytest.raises(RuntimeError) as raised:
            group._get_backend(torch.device("xpu"))
        assert isinstance(raised.value, DeviceError)
        before = group._get_sequence_number_for_group()
        td.all_reduce(torch.ones(1))
        assert group._get_sequence_number_for_group() == before + 1


test_identity = in_pool(identity)


def beside_torch(rank: int, folder: str) -> None:
    td.set_debug_level(td.DebugLevel.DETAIL)
    try:
        with world(rank, folder) as group:
            td.barrier()
            if torch.__version__ < "2.14":  # later ones take any group that takes CPU tensors
                with pytest.raises(ValueError, match="GLOO"):
                    td.monitored_barrier()
            else:
                td.monitored_barrier(timeout=LIMIT)
            group.monitored_barrier(LIMIT)
            if torch.__version__ < "2.15":  # later ones need no accelerator
                with pytest.raises(RuntimeError):
                    td.split_group(group, [[0], [1]])
            else:
                turned = td.split_group(group, [[1, 0]])
                assert (td.get_backend(turned), turned.rank()) == ("dure", 1 - rank)
                assert td.get_process_group_ranks(turned) == [1, 0]
                of_ranks = torch.tensor([rank, 5])
                td.broadcast(of_ranks, src=1, group=turned)
                assert of_ranks.tolist() == [1, 5]
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


test_beside_torch = in_pool(beside_torch)
