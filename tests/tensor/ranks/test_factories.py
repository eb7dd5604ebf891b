"""DTensors made of nothing have the values that torch's factories give unsharded."""

from __future__ import annotations

from typing import Any

import torch

from dure.tensor import Shard, empty, full, init_device_mesh, ones, rand, randn, zeros
from dure.testing import run_ranks


def test_factories_give_what_torch_gives_unsharded() -> None:
    torch.manual_seed(3)
    drawn = torch.rand(5, 3), torch.randn(5, 3, dtype=torch.float64)
    after = torch.default_generator.get_state()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        where: Any = {"device_mesh": mesh, "placements": (Shard(1), Shard(0))}
        assert torch.equal(ones(5, 3, **where).full_tensor(), torch.ones(5, 3))
        assert torch.equal(zeros((5, 3), **where).full_tensor(), torch.zeros(5, 3))
        made = full([5, 3], 7, requires_grad=False, **where)
        assert made.dtype == torch.int64
        assert torch.equal(made.full_tensor(), torch.full((5, 3), 7))
        bare = empty(5, 3, dtype=torch.float64, requires_grad=True, **where)
        assert bare.dtype == torch.float64
        assert bare.requires_grad
        assert bare.is_leaf
        assert bare.detach().to_local().shape == ((3, 2)[mesh.get_local_rank(1)],
                                                  (2, 1)[mesh.get_local_rank(0)])  # fmt: skip
        torch.manual_seed(3)
        values = rand(5, 3, **where), randn((5, 3), dtype=torch.float64, **where)
        for one, right in zip(values, drawn, strict=True):
            assert torch.equal(one.full_tensor(), right)

    run_ranks(4, body)
    assert torch.equal(torch.default_generator.get_state(), after)
