"""Distributed SGD by hand: data parallelism in ten lines, with nothing hidden.

Every rank holds the whole model and a part of the data. In each step each rank computes the
gradient of the loss on a batch of its own part; the gradients are averaged; every rank makes the
same step. Since the mean over a large batch is the mean of the means over its equal parts, n ranks
with batches of b samples make the steps of one process with batches of n * b.

Two things keep the replicas equal: they start from the same values (the seed), and every step uses
the same averaged gradient. The end of the program checks that not one bit differs.

    dure run --nproc 2 examples/05_distributed_sgd.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

import dure as dist
from dure.data import DataPartitioner, load_digits

GLOBAL_BATCH = 64
EPOCHS = 12


def build_model() -> nn.Module:
    torch.manual_seed(0)  # the same start on every rank
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()


def batches_per_epoch(loader: DataLoader) -> int:
    """Agree on a number of steps: parts may differ by a sample, and every step communicates."""
    count = torch.tensor([len(loader)])
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    return int(count.item())


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def check_replicas_are_equal(model: nn.Module) -> None:
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(mine, first), "the replicas have drifted apart"


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)  # ranks share the machine's cores

    digits = load_digits()
    parts = DataPartitioner(digits.train, [1 / size] * size, seed=1234)
    loader = DataLoader(parts.use(rank), batch_size=GLOBAL_BATCH // size, shuffle=True)
    steps = batches_per_epoch(loader)

    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        epoch_loss = torch.zeros(1)
        for _, (images, labels) in zip(range(steps), loader, strict=False):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            average_gradients(model)
            optimizer.step()
            epoch_loss += loss.detach()
        dist.all_reduce(epoch_loss, op=dist.ReduceOp.AVG)
        if rank == 0 and epoch % 3 == 2:
            print(f"epoch {epoch + 1:2}: mean loss {epoch_loss.item() / steps:.4f}")

    check_replicas_are_equal(model)
    reached = accuracy(model, digits.test.pixels, digits.test.labels)
    if rank == 0:
        print(f"{size} ranks x {len(parts.use(rank))} images: test accuracy {reached:.1%}")
    assert reached > 0.9, f"only {reached:.1%}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
