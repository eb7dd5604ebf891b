"""Post-local SGD: the group first, then the subgroup."""

from __future__ import annotations

import pytest
import torch

import dure as dist
from dure.testing import run_ranks
from tests.parallel.ddp.ddp_models import Layers, gradients


@pytest.mark.parametrize("reduce", [True, False])
def test_post_local_hook_leaves_the_group_for_the_subgroup_4_ranks(reduce: bool) -> None:
    def rank_main(rank: int) -> list[float]:
        pair, _ = dist.new_subgroups(2)
        state = dist.PostLocalSGDState(None, pair, 2, reduce)
        ddp = dist.DistributedDataParallel(Layers(2), bucket_cap_mb=1e-6)
        ddp.register_comm_hook(state, dist.post_localSGD_hook)
        found: list[float] = []
        for _ in range(4):
            ddp.zero_grad()
            ddp(torch.full((1, 2), float(rank)), 0, 1).backward()
            found.append(gradients(ddp)[0][0, 0].item())
        assert state.iter == 4
        return found

    for rank, found in enumerate(run_ranks(4, rank_main)):
        later = 0.5 + rank // 2 * 2 if reduce else float(rank)
        assert found == [1.5, 1.5, later, later]
