"""What two ranks do in the tests of DDP over NCCL: train on the simulated accelerator."""

from __future__ import annotations

from typing import Any

import torch

import dure as dist
from dure.parallel.ddp import DistributedDataParallel
from tests.parallel.fsdp.ranks import fsdp_models as models
from tests.testing.accelerator import simulated_ranks

SMALL_MB = 0.0005
"""Some parameters for each bucket."""


def run(names: list[str]) -> dict[str, str]:
    """Run the cases below on this rank; return its errors."""
    from tests.parallel.ddp import nccl_ranks

    return simulated_ranks.run(nccl_ranks, names)


def _made() -> Any:
    model = models.made()
    del model.unused
    return model


def _backward(model: Any, step: int, size: int, rank: int) -> torch.Tensor:
    """One backward on this rank's rows, on the device. The host never waits."""
    data = models.mine(models.batch(step), size, rank)
    rows, targets = (t.to("sim", non_blocking=True) for t in data)
    loss = models.loss_of(model, (rows, targets))
    loss.backward()
    return loss


def _compare(model: Any, reference: Any) -> None:
    for of in (models.full_gradients, models.full_weights):
        wanted = dict(of(reference).items())
        found = {name: each.cpu() for name, each in of(model).items() if each is not None}
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def _trains(rank: int, size: int, step: Any = _backward, **options: Any) -> None:
    reference = _made()
    models.trained(reference, models.by_step, models.adamw)
    model = DistributedDataParallel(_made().to("sim"), bucket_cap_mb=SMALL_MB, **options)
    models.trained(model, lambda m, s: step(m, s, size, rank), models.adamw)
    _compare(model.module, reference)


def case_buckets_are_reduced_while_backward_computes(rank: int, size: int) -> None:
    _trains(rank, size)


def case_gradients_without_views_are_copied_back(rank: int, size: int) -> None:
    _trains(rank, size, gradient_as_bucket_view=False)


def case_gradients_of_several_backwards_are_added(rank: int, size: int) -> None:
    def step(model: Any, number: int, size: int, rank: int) -> torch.Tensor:
        with model.no_sync():
            _backward(model, number, size, rank)
        loss = _backward(model, number, size, rank)
        for parameter in model.parameters():
            parameter.grad /= 2
        return loss

    _trains(rank, size, step)


def case_values_of_rank_0_are_broadcast(rank: int, size: int) -> None:
    reference, model = _made(), _made().to("sim")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + rank)
    model = DistributedDataParallel(model, bucket_cap_mb=SMALL_MB)
    models.by_step(reference, 0)
    _backward(model, 0, size, rank)
    _compare(model.module, reference)
    dist.barrier()
