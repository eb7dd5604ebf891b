"""Evaluating across ranks: each sample counts once, also where ranks do not divide the data.

Two things count a sample twice or give it another weight. A sampler that pads (torch's
`DistributedSampler`, and Dure's by default) repeats samples, so that all ranks have equally many.
And a mean of the ranks' means is not the mean over samples. So: `pad=False`, sums and counts, and
one all_reduce after the loop.

Ranks then have different numbers of batches. Replicas (DDP) do not mind, if the loop calls the
module itself. A sharded model gathers weights in each forward: ranks that leave the block of
`follow` take part in that until all have left it. Predictions are gathered with the numbers of
their samples, each of which must occur once.

The check: one process evaluates the same data. The padded mean of means gives another number.

    dure run --nproc 2 examples/recipes/evaluate.py          (any number up to 4)
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dure as dist
from dure.fsdp import FSDPModule, follow, fully_shard

SAMPLES, BATCH, CLASSES = 13, 3, 4


def build() -> nn.Linear:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Linear(6, CLASSES).double()


def data() -> TensorDataset:
    """Return inputs, labels, and the number of each sample."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator).double()
    return TensorDataset(
        x, torch.randint(CLASSES, (SAMPLES,), generator=generator), torch.arange(SAMPLES)
    )


@torch.no_grad()
def evaluate(module: nn.Module) -> tuple[float, float, list[int]]:
    """Return loss and accuracy over all samples, and all predictions; equal on all ranks."""
    loader = dist.DataLoader(data(), batch_size=BATCH, pad=False)
    totals = torch.zeros(3, dtype=torch.float64)  # loss, right answers, samples
    answers: list[tuple[int, int]] = []
    with follow(module) if isinstance(module, FSDPModule) else contextlib.nullcontext():
        for x, y, number in loader:
            scores = module(x)
            totals[0] += F.cross_entropy(scores, y, reduction="sum")
            totals[1] += (scores.argmax(1) == y).sum()
            totals[2] += len(y)
            answers += zip(number.tolist(), scores.argmax(1).tolist(), strict=True)
    dist.all_reduce(totals)  # after the block, not in it: ranks have different numbers of batches
    gathered: list[list[tuple[int, int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, answers)
    ordered = sorted(pair for part in gathered for pair in part)
    assert [number for number, _ in ordered] == list(range(SAMPLES)), "a sample counted twice"
    loss, right, samples = totals.tolist()
    return loss / samples, right / samples, [answer for _, answer in ordered]


@torch.no_grad()
def padded_mean_of_means(module: nn.Module) -> float:
    """Return the loss as it is often computed: padded, and a mean over ranks of means."""
    loader = dist.DataLoader(data(), batch_size=BATCH)
    means = [F.cross_entropy(module(x), y) for x, y, _ in loader]
    mean = torch.stack(means).mean()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()


def main() -> None:
    dist.init_process_group()

    x, y, _ = data().tensors
    alone = build()
    with torch.no_grad():
        scores = alone(x)
    loss = F.cross_entropy(scores, y).item()
    accuracy = int((scores.argmax(1) == y).sum()) / SAMPLES

    replicas = dist.DistributedDataParallel(build())
    found = [evaluate(replicas.module)]  # the module: a call of DDP itself may send buffers
    found.append(evaluate(fully_shard(build())))
    for of_all, right, answers in found:
        assert abs(of_all - loss) < 1e-12, (of_all, loss)
        assert right == accuracy
        assert answers == scores.argmax(1).tolist()

    usual = padded_mean_of_means(replicas.module)
    assert abs(usual - loss) > 1e-3 or dist.get_world_size() == 1
    if dist.get_rank() == 0:
        print(f"{SAMPLES} samples, each once: loss {loss:.4f}, accuracy {accuracy:.4f}")
        print(f"the padded mean of means would be {usual:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
