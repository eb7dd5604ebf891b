"""What two ranks do in the tests of pipelines over NCCL: train on the simulated accelerator."""

from __future__ import annotations

import torch

import dure as dist
from tests.parallel.pipeline.ranks import pipeline_models as models
from tests.testing.accelerator import simulated_ranks


def run(names: list[str]) -> dict[str, str]:
    """Run the cases below on this rank; return its errors."""
    from tests.parallel.pipeline import nccl_ranks

    return simulated_ranks.run(nccl_ranks, names)


def _trains(name: str, num_parts: int, rank: int, size: int) -> None:
    device, microbatches = torch.device("sim", 0), 4
    parts, batches = models.dense(num_parts), models.batches(3, rows=8)
    expected = models.one_process(parts, batches, microbatches)
    mine = models.Pipeline(
        name,
        rank,
        size,
        parts,
        microbatches,
        wrap=lambda part: part.to(device),
        device=device,
    )
    losses, weights = mine.train([(x.to(device), y.to(device)) for x, y in batches])
    on_host = {key: value.cpu() for key, value in weights.items()}
    found: list[models.Trained] = [([], {})] * size
    dist.all_gather_object(found, (losses, on_host))
    models.verify_same(found, expected)


def case_gpipe(rank: int, size: int) -> None:
    _trains("gpipe", 2, rank, size)


def case_1f1b(rank: int, size: int) -> None:
    _trains("1f1b", 2, rank, size)


def case_interleaved(rank: int, size: int) -> None:
    _trains("interleaved", 4, rank, size)
