"""The GPT of the examples on real text: n ranks against one process, and against torch's DDP."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.utils.data import DataLoader

import dure as dist
from dure.data import TextData, load_python_sources
from dure.testing import ProcessPool, run_ranks

sys.path.append(str(Path(__file__).parents[2] / "examples"))
gpt: Any = importlib.import_module("gpt")

SIZE = gpt.Size(layers=2, heads=2, width=32, context=16)
STEPS, ACCUMULATE, SEQUENCES = 5, 2, 12  # 12: the small batch of all ranks; 1 to 4 divide it


def text() -> TextData:
    return load_python_sources(SIZE.context, max_bytes=5_000)


def new_model(data: TextData, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(7)
    return gpt.GPT(SIZE, len(data.vocabulary)).to(dtype)


def train(model: nn.Module, data: TextData, rank: int, size: int) -> list[torch.Tensor]:
    """Train on a rank's share; return its loss of each step, and the parameters at the end."""
    torch.set_num_threads(1)  # of this thread: more cost more than they save
    sampler = dist.DistributedSampler(data.train, size, rank, shuffle=True, drop_last=True)
    batches = iter(DataLoader(data.train, SEQUENCES // size, sampler=sampler, drop_last=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    no_sync: Callable[[], AbstractContextManager[None]] = getattr(model, "no_sync", nullcontext)
    losses = torch.zeros(STEPS, dtype=torch.float64)
    for number in range(STEPS * ACCUMULATE):
        last = (number + 1) % ACCUMULATE == 0
        inputs, targets = next(batches)
        with nullcontext() if last else no_sync():
            loss = gpt.next_token_loss(model(inputs), targets) / ACCUMULATE
            loss.backward()
        losses[number // ACCUMULATE] += loss.detach()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return [losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_loss_curve_is_the_one_of_one_process(n: int) -> None:
    data = text()
    expected = train(new_model(data, torch.float64), data, 0, 1)
    model = new_model(data, torch.float64)
    assert expected[0][-1] < 0.9 * expected[0][0]  # it learns, so there is something to compare

    def body(rank: int) -> list[torch.Tensor]:
        ddp = dist.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.05)
        found = train(ddp, data, rank, n)
        dist.all_reduce(found[0], dist.ReduceOp.AVG)  # of equal parts
        return found

    results = run_ranks(n, body)
    # Sums over the batch are taken in another order; Adam divides small numbers by small ones.
    torch.testing.assert_close(results[0][0], expected[0], rtol=1e-11, atol=0)
    for found in results:
        for ours, first, alone in zip(found, results[0], expected, strict=True):
            assert torch.equal(ours, first)
            torch.testing.assert_close(ours, alone, rtol=1e-7, atol=1e-9)


def both(rank: int, folder: str) -> tuple[bool, list[float]]:
    """Train with torch's DDP on gloo and with ours; tell whether all is bitwise equal."""
    data = text()
    model = new_model(data, torch.float32)
    store = torch_dist.FileStore(f"{folder}/store", 2)  # pyright: ignore[reportPrivateImportUsage]
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        theirs = train(nn.parallel.DistributedDataParallel(copy.deepcopy(model)), data, rank, 2)
    finally:
        torch_dist.destroy_process_group()
    ours = train(dist.DistributedDataParallel(copy.deepcopy(model)), data, rank, 2)
    same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return same, ours[0].tolist()


def test_training_is_bitwise_that_of_torchs_ddp_on_gloo_2_ranks(
    process_pool: Callable[..., ProcessPool], tmp_path: Path
) -> None:
    # With two ranks both average as (a + b) / 2, whatever the order: not a bit may differ.
    (same_0, losses_0), (same_1, losses_1) = process_pool(2).run(both, str(tmp_path))
    assert same_0 and same_1
    assert losses_0 != losses_1  # the ranks saw different text
