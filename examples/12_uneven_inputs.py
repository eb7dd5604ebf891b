"""Uneven inputs: ranks with different numbers of batches, and batches of different sizes.

Every step of data parallelism needs all ranks. Where data does not divide evenly, one of them runs
out of batches first, and the others would wait for it in vain. Three ways out, shown here:

1. `ddp.join()`: a rank without batches goes on taking part, with nothing to add. Each sample keeps
   its weight, and in the end all ranks have the same model. The program checks it against one
   process that makes the same steps with the same samples.
2. `throw_on_early_termination=True`: all ranks stop together, and know who ran out.
3. An uneven last batch: its parts have different sizes on different ranks, and may be empty. With
   the right weight of each part the gradient is exactly that of the whole batch.

    dure run --nproc 2 examples/12_uneven_inputs.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dure as dist
from dure.data import load_digits

BATCH = 32


def build_model() -> nn.Module:
    torch.manual_seed(0)  # the same start on every rank, and in the process alone
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches_of(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches of one rank: 6 on rank 0, 4 on rank 1, 2, none at all, then again."""
    images, labels = load_digits().train[:]
    count, first = 6 - 2 * (rank % 4), 6 * rank
    rows = [
        slice((first + i) * BATCH % 1024, (first + i) * BATCH % 1024 + BATCH) for i in range(count)
    ]
    return [(images[r].double(), labels[r]) for r in rows]


def train_alone(size: int) -> list[torch.Tensor]:
    """Make the steps of all ranks in one process, and return the parameters."""
    model = build_model()
    optimizer = build_optimizer(model)
    parts = [batches_of(rank) for rank in range(size)]
    for step in range(max(map(len, parts))):
        optimizer.zero_grad()
        for part in parts:
            if step < len(part):
                images, labels = part[step]
                (cross_entropy(model(images), labels) / size).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_with_join() -> nn.Module:
    """Train on this rank's batches, however many there are."""
    ddp = dist.DistributedDataParallel(build_model())
    optimizer = build_optimizer(ddp)
    # The optimizer has momentum: its state, too, shall be the same everywhere in the end.
    with ddp.join(optimizer=optimizer):
        for images, labels in batches_of(dist.get_rank()):
            optimizer.zero_grad()
            cross_entropy(ddp(images), labels).backward()
            optimizer.step()
    return ddp.module


def train_until_one_runs_out() -> tuple[int, tuple[int, ...]]:
    """Stop all ranks when the first has no more batches; return the steps made, and who ran out."""
    ddp = dist.DistributedDataParallel(build_model())
    steps = 0
    try:
        with ddp.join(throw_on_early_termination=True):
            for images, labels in batches_of(dist.get_rank()):
                cross_entropy(ddp(images), labels).backward()
                steps += 1
    except dist.UnevenInputs as end:
        return steps, end.ranks
    return steps, ()


def gradient_of_an_uneven_batch(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a batch of 5 samples, by all ranks together and by one alone."""
    images, labels = (t[:5] for t in load_digits().train[:])
    images = images.double()
    mine = slice(rank, None, size)  # some ranks have a sample more than others, or one has none
    ddp = dist.DistributedDataParallel(build_model())
    # Not the mean over this rank's samples: their sum, as part of the mean over all 5. DDP divides
    # by the number of ranks, so the factor takes that back.
    loss = cross_entropy(ddp(images[mine]), labels[mine], reduction="sum") * size / len(labels)
    loss.backward()
    alone = build_model()
    cross_entropy(alone(images), labels).backward()
    return tuple(
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        for model in (ddp, alone)
    )


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # ranks share the machine's cores

    model = train_with_join()
    for ours, theirs in zip(model.parameters(), train_alone(size), strict=True):
        torch.testing.assert_close(ours.detach(), theirs)

    counts = [len(batches_of(r)) for r in range(size)]
    steps, exhausted = train_until_one_runs_out()
    assert steps == min(counts)
    assert exhausted == tuple(
        r for r, count in enumerate(counts) if min(counts) == count != max(counts)
    )

    ours, theirs = gradient_of_an_uneven_batch(rank, size)
    torch.testing.assert_close(ours, theirs)

    if rank == 0:
        print(f"batches of the ranks: {counts}")
        print("join: the model is that of one process with the same samples")
        print(f"throw_on_early_termination: all ranks stopped after {steps} steps")
        print("uneven last batch: the gradient is that of the whole batch")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
