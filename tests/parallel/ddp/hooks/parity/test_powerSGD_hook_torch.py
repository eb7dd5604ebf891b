"""PowerSGD against torch's own hook on gloo: the same gradients from the same first basis."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

import dure as dist
from tests.parallel.torch_gloo import torch_group

ROWS, COLUMNS, STEPS = 12, 16, 5
START = 2  # the first steps are averaged as they are


def gradients(ddp: Any, rank: int) -> list[torch.Tensor]:
    """Return the gradients of each step, on data of this rank's own."""
    generator = torch.Generator().manual_seed(rank)
    found: list[torch.Tensor] = []
    for _ in range(STEPS):
        ddp.zero_grad()
        ddp(torch.randn(4, COLUMNS, generator=generator)).sin().sum().backward()
        found += [p.grad.clone() for p in ddp.parameters()]
    return found


def both(rank: int, folder: str, r: int) -> None:
    """Compare the gradients; each library would draw another first basis, so both get one."""
    basis = torch.randn(COLUMNS, r, generator=torch.Generator().manual_seed(7))
    torch.manual_seed(7)  # the same on both ranks
    model = nn.Linear(COLUMNS, ROWS)
    options: dict[str, Any] = {"matrix_approximation_rank": r, "start_powerSGD_iter": START}
    with torch_group(rank, 2, f"{folder}/store"):
        state: Any = theirs.PowerSGDState(None, min_compression_rate=1, **options)
        state.p_memory_dict[0], state.q_memory_dict[0] = (
            torch.empty(ROWS * r),
            basis.flatten().clone(),
        )
        other = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
        other.register_comm_hook(state, theirs.powerSGD_hook)
        expected = gradients(other, rank)
    mine = dist.PowerSGDState(None, min_compression_rate=1, **options)
    mine.q_memory_dict["weight"] = basis
    ddp = dist.DistributedDataParallel(model)
    ddp.register_comm_hook(mine, dist.powerSGD_hook)
    torch.testing.assert_close(gradients(ddp, rank), expected)
    weights = expected[2 * START :: 2]
    assert all(torch.linalg.matrix_rank(w, atol=1e-4) == r for w in weights)


@pytest.mark.parametrize("r", [1, 3])
def test_powersgd_gives_the_gradients_of_torchs_hook_2_ranks(process_pool, tmp_path, r):
    process_pool(2).run(both, str(tmp_path), r)
