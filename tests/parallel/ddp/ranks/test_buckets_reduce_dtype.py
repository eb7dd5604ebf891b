"""DDP reduces in `reduce_dtype` whatever parameters are: DTensors, and those with sparse gradients.

1 + SMALL is 1 in bfloat16, and exact in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dure as dist
from dure.mesh import init_device_mesh
from dure.tensor import Replicate
from dure.testing import run_ranks
from tests.parallel.pending_terms import SMALL, Scale, backward, rows


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "expected"),
    [
        (torch.bfloat16, torch.float32, 1 + SMALL),
        (None, torch.bfloat16, 1.0),
        (None, None, 1 + SMALL),
    ],
)
def test_terms_over_tensor_parallel_ranks_4_ranks(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, expected: float
) -> None:
    def rank_main(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        precision = dist.MixedPrecision(param_dtype, reduce_dtype)
        ddp = dist.DistributedDataParallel(
            Scale(mesh["tp"]), mesh=mesh["dp"], mixed_precision=precision
        )
        x = rows(mesh)
        with ddp.no_sync():
            backward(ddp, x)
        backward(ddp, x)
        grad: Any = ddp.module.weight.grad
        assert grad.dtype == torch.float32 and grad.placements == (Replicate(),)
        return grad.to_local().tolist()

    assert run_ranks(4, rank_main) == [[expected * 2] * 2] * 4
