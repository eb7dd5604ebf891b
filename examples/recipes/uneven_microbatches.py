"""Gradient accumulation with microbatches of different sizes and numbers, exact per sample.

Ranks have sequences of different lengths, and as many microbatches as these fill: 1 on rank 0, 2 on
rank 1, and so on. A mean of the microbatches' means gives a token of a short microbatch a larger
weight. So losses are sums, times a factor that `scale_by` computes from the token counts of the
complete step.

* `DistributedDataParallel`: the last backward of each rank reduces; under `no_sync` the others send
  nothing. So ranks may have different numbers of microbatches.
* `fully_shard` communicates in each forward and backward, so all ranks need equally many. Ranks
  with fewer repeat one with the factor 0.

The check: one process computes the gradient of the mean over all tokens. The usual division by the
number of microbatches gives another gradient, as the last lines show.

    dure run --nproc 2 examples/recipes/uneven_microbatches.py          (2 or more ranks)
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

import dure as dist
from dure.fsdp import FSDPModule, fully_shard, scale_by

WORDS, WIDTH, PADDING = 20, 8, -100
Microbatch = tuple[torch.Tensor, torch.Tensor]  # words, and labels with PADDING where none counts


def build() -> nn.Sequential:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)).double()


def microbatches(rank: int) -> list[Microbatch]:
    """Return what a rank has in this step: 1 + rank microbatches of 2 sequences each."""
    generator = torch.Generator().manual_seed(rank)
    made = []
    for number in range(1 + rank):
        words = torch.randint(WORDS, (2, 3 + 2 * rank + number), generator=generator)
        labels = words.roll(-1, 1)
        labels[:, -1] = PADDING
        labels[0, 1 + number :] = PADDING  # the first sequence is shorter
        made.append((words, labels))
    return made


def total_loss(model: nn.Module, microbatch: Microbatch) -> torch.Tensor:
    """Return the sum of the losses of all tokens that count."""
    words, labels = microbatch
    scores = model(words).flatten(0, 1)
    return F.cross_entropy(scores, labels.flatten(), ignore_index=PADDING, reduction="sum")


def accumulate_replicas(model: dist.DistributedDataParallel, mine: list[Microbatch]) -> None:
    """Leave exact gradients in replicas of DDP, from any number of microbatches, at least one."""
    scale = scale_by([labels != PADDING for _, labels in mine])  # once per step, on all ranks
    for microbatch in mine[:-1]:
        with model.no_sync():
            (total_loss(model, microbatch) * scale).backward()
    (total_loss(model, mine[-1]) * scale).backward()


def accumulate_shards(model: FSDPModule, mine: list[Microbatch]) -> None:
    """Leave exact gradients in shards; ranks with fewer microbatches repeat one, times 0."""
    scale = scale_by([labels != PADDING for _, labels in mine])
    most = torch.tensor(len(mine))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    for number in range(int(most)):
        model.set_requires_gradient_sync(number == most - 1)
        has_one = number < len(mine)
        microbatch = mine[number] if has_one else mine[0]
        (total_loss(model, microbatch) * (scale if has_one else 0.0)).backward()


def mean_of_means(model: dist.DistributedDataParallel, mine: list[Microbatch]) -> None:
    """Do as usual: the mean loss of each microbatch, divided by their number. It is not exact."""
    for number, (words, labels) in enumerate(mine):
        is_last = number == len(mine) - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            scores = model(words).flatten(0, 1)
            (F.cross_entropy(scores, labels.flatten(), ignore_index=PADDING) / len(mine)).backward()


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = microbatches(rank)

    alone = build()
    everything = [one for r in range(size) for one in microbatches(r)]
    tokens = sum(int((labels != PADDING).sum()) for _, labels in everything)
    (sum(total_loss(alone, one) for one in everything) / tokens).backward()
    expected = [parameter.grad for parameter in alone.parameters()]

    replicas = dist.DistributedDataParallel(build())
    accumulate_replicas(replicas, mine)
    shards = build()
    for layer in shards:
        fully_shard(layer)
    accumulate_shards(fully_shard(shards), mine)
    for parameter, exact in zip(replicas.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, exact, rtol=1e-9, atol=1e-12)
    for parameter, exact in zip(shards.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), exact, rtol=1e-9, atol=1e-12)

    usual = dist.DistributedDataParallel(build())
    mean_of_means(usual, mine)
    pairs = list(zip(usual.parameters(), expected, strict=True))
    off = max(((p.grad - exact).abs().max() / exact.abs().max()).item() for p, exact in pairs)
    assert size == 1 or off > 0.01, off
    if rank == 0:
        print(f"{len(everything)} microbatches, {tokens} tokens: the gradient of one process")
        print(f"the mean of means would be off by {off:.0%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
