"""DistributedDataParallel on real images: what to use when example 05 has been understood.

Three lines change against a program for one process: the model is wrapped, a sampler deals out the
data, and figures that are reported are averaged. Gradients are averaged while backward still
computes the next ones; `ddp.step_times` tells how much of that was not hidden.

The program also shows what goes wrong most often, done right: the sampler is told the epoch (or
every epoch has the same order), only one rank prints, a large batch is made of several small ones
under `no_sync()`, and the state is saved without the wrapper's prefix.

    dure run --nproc 2 examples/07_ddp_images.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import dure as dist
from dure.data import Images, load_digits

EPOCHS, GLOBAL_BATCH, ACCUMULATE = 8, 64, 2


class Net(nn.Module):
    """A small convolutional network for 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Linear(32 * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores [n, 10] for images [n, 1, 8, 8]."""
        return self.classify(self.features(images).flatten(1))


def train_epoch(
    ddp: dist.DistributedDataParallel, loader: DataLoader, optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    """Train for an epoch; return this rank's mean loss and its exposed share of communication."""
    losses: list[float] = []
    exposed = total = 0.0
    ddp.train()
    for number, (images, labels) in enumerate(loader, 1):
        if number % ACCUMULATE:
            with ddp.no_sync():  # add this batch's gradients up; do not average yet
                loss = nn.functional.cross_entropy(ddp(images), labels) / ACCUMULATE
                loss.backward()
        else:
            loss = nn.functional.cross_entropy(ddp(images), labels) / ACCUMULATE
            loss.backward()  # averages the sum of all batches since the last step
            optimizer.step()
            optimizer.zero_grad()
            times = ddp.step_times
            exposed += times.exposed_comm_s
            total += times.forward_s + times.backward_s + times.exposed_comm_s
        losses.append(loss.item() * ACCUMULATE)
    return sum(losses) / len(losses), exposed / total


def accuracy(model: nn.Module, test: Images) -> float:
    """Measure on all ranks together: each takes every n-th image, the counts are summed."""
    model.eval()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        right = (model(test.pixels[mine]).argmax(1) == test.labels[mine]).sum()
    dist.all_reduce(right)
    return right.item() / len(test)


def save_and_load(ddp: dist.DistributedDataParallel) -> nn.Module:
    """Save on rank 0, without the prefix "module."; load everywhere into a bare model."""
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(folder, src=0)
    path = Path(str(folder[0])) / "model.pt"
    if dist.get_rank() == 0:
        torch.save(ddp.module.state_dict(), path)
    dist.barrier()  # nobody reads before it is written
    model = Net()
    model.load_state_dict(torch.load(path, weights_only=True))
    dist.barrier()  # nobody removes it before all have read it
    if dist.get_rank() == 0:
        path.unlink()
        path.parent.rmdir()
    return model


def main() -> None:
    dist.init_process_group()
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    sampler = dist.DistributedSampler(digits.train, shuffle=True, drop_last=True)
    loader = DataLoader(
        digits.train, batch_size=GLOBAL_BATCH // ACCUMULATE // size, sampler=sampler, drop_last=True
    )
    torch.manual_seed(rank)  # on purpose not the same: DDP starts all ranks from rank 0's values
    ddp = dist.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.03, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        loss, share = train_epoch(ddp, loader, optimizer)
        if rank == 0:
            print(f"epoch {epoch + 1:2}: loss {loss:.4f}, communication {share:.1%} of a step")

    reached = accuracy(ddp, digits.test)
    assert accuracy(save_and_load(ddp), digits.test) == reached
    if rank == 0:
        print(f"{size} ranks: test accuracy {reached:.1%}")
    assert reached > 0.93, f"only {reached:.1%}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
