"""DDP that computes and reduces in fewer bits than its parameters have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.testing import CommRecorder, run_ranks
from tests.parallel.ddp.ddp_models import Layers
from tests.training.precision_models import BF16, batch, loss_of, made


def low_precision_gradients(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The reference: the same module as a whole in bfloat16."""
    low = copy.deepcopy(model).to(torch.bfloat16)
    loss_of(low(tokens, torch.tensor(0.5, dtype=torch.bfloat16)), tokens).backward()
    return [p.grad for p in low.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("n", "recompute"), [(1, None), (2, None), (2, False), (2, True), (4, None)]
)
def test_training_is_that_of_low_precision_copies_of_master_weights(
    n: int, recompute: bool | None
) -> None:
    # The oracle is written out: torch's own mixed precision needs streams, which a CPU has not.
    steps = 2

    def rank_main(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        ddp: Any = dist.DistributedDataParallel(made(recompute), mixed_precision=BF16)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.02)
        for step in range(steps):
            optimizer.zero_grad()
            logits = ddp(batch(rank, step), torch.tensor(0.5))
            assert logits.dtype == torch.bfloat16
            loss_of(logits, batch(rank, step)).backward()
            optimizer.step()
        assert set(ddp.module.seen) == {torch.bfloat16}
        assert {t.dtype for t in ddp.state_dict().values()} == {torch.float32}
        assert ddp.module.embed.weight is dict(ddp.module.named_parameters())["embed.weight"]
        return [p.detach() for p in ddp.parameters()], [p.grad for p in ddp.parameters()]

    master = made(recompute)
    optimizer = torch.optim.AdamW(master.parameters(), lr=0.02)
    for step in range(steps):
        parts = [low_precision_gradients(master, batch(r, step)) for r in range(n)]
        for p, grads in zip(master.parameters(), zip(*parts, strict=True), strict=True):
            p.grad = (torch.stack(grads).float().sum(0) / n).to(torch.bfloat16).float()
        optimizer.step()
    parameters, gradients = zip(*((p.detach(), p.grad) for p in master.parameters()), strict=True)
    for found in run_ranks(n, rank_main):
        torch.testing.assert_close(found, ([*parameters], [*gradients]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("precision", "itemsize"),
    [
        (None, 4),
        (dist.MixedPrecision(param_dtype=torch.bfloat16), 2),
        (dist.MixedPrecision(reduce_dtype=torch.bfloat16), 2),
        (dist.MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32), 4),
    ],
)
def test_bytes_on_the_way_are_those_of_the_reduce_dtype_2_ranks(
    precision: dist.MixedPrecision | None, itemsize: int
) -> None:
    def rank_main(rank: int) -> list[Any]:
        model = nn.Linear(64, 64)
        ddp = dist.DistributedDataParallel(model, mixed_precision=precision)
        with CommRecorder() as seen:
            ddp(torch.ones(1, 64)).float().sum().backward()
        return [seen.ops, seen.nbytes()]

    numbers = 64 * 64 + 64 + 3  # the bitmap: a number for each of two gradients, and one more
    assert run_ranks(2, rank_main) == [[["all_reduce"], numbers * itemsize]] * 2


def test_accumulation_is_in_float32_2_ranks() -> None:
    # Eight gradients of 1 + 2**-8 of the first: in bfloat16 the small parts would be lost.
    def rank_main(rank: int) -> float:
        model = nn.Linear(1, 1, bias=False)
        precision = dist.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        ddp = dist.DistributedDataParallel(model, mixed_precision=precision)
        with ddp.no_sync():
            ddp(torch.full((1, 1), 256.0)).sum().backward()
            for _ in range(7):
                ddp(torch.ones(1, 1)).sum().backward()
        ddp(torch.ones(1, 1)).sum().backward()
        assert model.weight.grad is not None
        return float(model.weight.grad)

    assert run_ranks(2, rank_main) == [264.0] * 2


def test_unused_parameters_keep_their_gradients_2_ranks() -> None:
    def rank_main(rank: int) -> list[Any]:
        model = Layers(2)
        ddp = dist.DistributedDataParallel(model, mixed_precision=BF16, find_unused_parameters=True)
        idle, x = model.layers[1].weight, torch.ones(1, 2)
        grads: list[Any] = []
        for used in ([0], [0, 1] if rank == 0 else [0], [0]):
            ddp(x, *used).backward()
            grads.append(None if idle.grad is None else idle.grad.flatten().tolist())
        return grads

    assert run_ranks(2, rank_main) == [[None, [0.5] * 4, [0.5] * 4]] * 2


def test_overflow_in_the_reduction_skips_the_step_on_all_ranks_2_ranks() -> None:
    # 300 * 300 does not fit float16: the gradient of rank 1 alone overflows, the average shows it.
    def rank_main(rank: int) -> list[Any]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        ddp = dist.DistributedDataParallel(
            model, mixed_precision=dist.MixedPrecision(reduce_dtype=torch.float16)
        )
        scaler = dist.GradScaler("cpu", init_scale=300.0)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        moved: list[bool] = []
        for bad in (True, False):
            optimizer.zero_grad()
            x = torch.full((1, 1), 300.0 if rank and bad else 1.0)
            scaler.scale(ddp(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            moved.append(float(model.weight.detach()) != 1.0)
        return [moved, scaler.get_scale()]

    assert run_ranks(2, rank_main) == [[[False, True], 150.0]] * 2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_rank_without_inputs_gets_the_others_gradients_2_ranks(dtype: torch.dtype | None) -> None:
    def rank_main(rank: int) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        precision = dist.MixedPrecision(reduce_dtype=dtype)
        ddp = dist.DistributedDataParallel(model, mixed_precision=precision)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        nn.init.zeros_(model.weight)
        with dist.Join([ddp]):
            for step in range(1 + 2 * rank):
                ddp(torch.full((1, 1), 2.0**step)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.detach().flatten().tolist()

    # Gradients are divided by all ranks, also by those that have no inputs any more.
    assert run_ranks(2, rank_main) == [[-4.0]] * 2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_accumulated_gradients_survive_new_buckets_2_ranks(dtype: torch.dtype | None) -> None:
    def rank_main(rank: int) -> list[float]:
        model = Layers(3)
        ddp = dist.DistributedDataParallel(
            model, bucket_cap_mb=1e-6, mixed_precision=dist.MixedPrecision(reduce_dtype=dtype)
        )
        ddp(torch.ones(1, 2), 2, 1, 0).backward()  # against the order of registration
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(torch.full((1, 2), 2.0 * rank), 0, 1).backward()
        ddp(torch.ones(1, 2), 1, 2).backward()  # new buckets; layer 0 is not used
        assert ddp._get_ddp_logging_data()["has_rebuilt_buckets"]
        return [float(p.grad[0, 0]) for p in model.parameters() if p.grad is not None]

    assert run_ranks(2, rank_main) == [[1.0, 2.0, 1.0]] * 2
