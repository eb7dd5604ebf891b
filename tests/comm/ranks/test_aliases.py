"""Private names of torch that many programs import."""

from datetime import timedelta

import torch

import dure as dist
from dure import distributed_c10d as c10d
from dure.testing import run_ranks


def test_private_names_of_torch_lead_to_the_groups_of_this_rank():
    def body(rank):
        world, group = c10d._get_default_group(), dist.new_group([1, 2])
        assert c10d._world.default_pg is world
        assert c10d._world.group_count == 2
        if rank == 0:
            assert c10d._rank_not_in_group(group)
            return None
        assert c10d._world.pg_group_ranks == {world: {0: 0, 1: 1, 2: 2}, group: {1: 0, 2: 1}}
        assert c10d._world.pg_map[world] == (world.backend_name, c10d._get_default_store())
        assert c10d._world.pg_names[group] == c10d._get_process_group_name(group)
        c10d._set_pg_timeout(timedelta(seconds=7), group)
        assert c10d._get_pg_default_device(group) == torch.device("cpu")
        return group.timeout.total_seconds()

    assert run_ranks(3, body) == [None, 7, 7]
