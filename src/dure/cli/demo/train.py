"""The program that `dure demo` trains with: an ordinary data-parallel PyTorch program.

Every rank runs this file. It builds the same model, takes its share of each batch, and
`DistributedDataParallel` averages the gradients while backward goes on, so that after each step all
ranks hold the same parameters: those that one process would have after the whole batch. With
`--fsdp` the ranks share one set of parameters, gradients and optimizer state instead.

Run it by itself, on 2 ranks:  dure run --nproc 2 -m dure.cli.demo.train --epochs 5
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

import dure as dist
from dure import fsdp
from dure.cli.demo.events import PHASES, EpochEnd, Event, Memory, Start, Step, encode
from dure.data import DistributedSampler, ImageData, load_digits, load_idx
from dure.errors import UsageError

Report = Callable[[Event], None]
Batches = DataLoader[tuple[torch.Tensor, torch.Tensor]]


def build_model(side: int, num_classes: int, width: int = 64, hidden: int = 0) -> nn.Sequential:
    """Build a network that maps pixels [n, 1, side, side] to logits [n, classes].

    It has neither dropout nor batch norm, so what it learns does not depend on who holds which part
    of a batch. Images larger than 16 pixels are halved by the first convolution. So many `hidden`
    layers before the last one make it large beside what it computes.
    """
    features = 2 * width * 9
    between = [m for _ in range(hidden) for m in (nn.Linear(features, features), nn.ReLU())]
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, stride=2 if side > 16 else 1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(3),
        nn.Flatten(),
        *between,
        nn.Linear(features, num_classes),
    )
    for layer in list(model)[:-1]:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # one core a rank: more ranks, not more threads, make it faster
    dist.init_process_group(options.backend)
    try:
        data = load_idx(options.data) if options.data else load_digits()
        train(options, data, tell_by_line if options.events else tell_a_person)
    finally:
        dist.destroy_process_group()


def train(options: argparse.Namespace, data: ImageData, report: Report) -> None:
    world_size = dist.get_world_size()
    torch.manual_seed(options.seed)
    before = memory()
    model = build_model(data.train.pixels.shape[-1], data.num_classes, hidden=options.hidden)
    if options.fsdp:
        model = shard(model)
    elif world_size > 1:
        model = dist.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-3)
    images = Subset(data.train, range(min(options.images, len(data.train))))
    # Dropping the odd images, here and below, gives any number of ranks the same batches.
    sampler = DistributedSampler(images, seed=options.seed, drop_last=True)
    batches = DataLoader(
        images, batch_size=options.batch_size // world_size, sampler=sampler, drop_last=True
    )
    steps = options.epochs * len(batches)
    if options.batch_size % world_size or not steps:
        raise UsageError(
            "the batch cannot be shared out",
            seen=f"{options.batch_size} of {len(images)} images a batch, {world_size} ranks",
            fix="Use a batch size that the number of ranks divides, at most the training set.",
        )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps)
    meter = dist.StepMeter(model, optimizer)
    report(describe(data, model, len(images), steps, len(batches)))
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for i, (loss, phases) in enumerate(run_epoch(model, optimizer, batches, meter), 1):
            schedule.step()
            report(Step(step=epoch * len(batches) + i, loss=loss, phases=phases))
        report(EpochEnd(epoch=epoch + 1, accuracy=evaluate(model, data)))
        if before:
            report(Memory(nbytes=memory() - before))


def shard(model: nn.Sequential) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fsdp.fully_shard(layer)
    return fsdp.fully_shard(model)


def memory() -> int:
    """Return this rank's share of the host's memory, in bytes; 0 where the system does not tell."""
    try:
        rows = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    except OSError:
        return 0
    return sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:"))


def run_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    meter: dist.StepMeter,
) -> Iterator[tuple[float, dict[str, float]]]:
    """Take one step a batch; yield its loss, and where its time went."""
    for pixels, labels in meter.batches(batches):
        loss = F.cross_entropy(model(normalize(pixels)), labels, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.end_step()  # what the caller does with the loss is no part of it
        took = meter.last
        work = (took.data_wait_s, took.forward_s, took.backward_s, took.exposed_comm_s)
        yield loss.item(), dict(zip(PHASES, (*work, took.optimizer_s, took.other_s), strict=True))


def normalize(pixels: torch.Tensor) -> torch.Tensor:
    """Bring pixels from 0 to 1, mostly dark, to a mean near 0 and a deviation near 1."""
    return (pixels - 0.3) / 0.35


@torch.no_grad()
def evaluate(model: nn.Module, data: ImageData) -> float:
    """Return the accuracy on the test images, of which each rank looks at its share."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pixels, labels = (t[rank::world_size] for t in (data.test.pixels, data.test.labels))
    correct = torch.zeros(1, dtype=torch.int64)
    is_sharded = isinstance(model, fsdp.FSDPModule)
    # Shares may be of different lengths.
    with fsdp.follow(model) if is_sharded else nullcontext():
        for i in range(0, len(labels), 500):
            guesses = model(normalize(pixels[i : i + 500])).argmax(dim=1)
            correct += (guesses == labels[i : i + 500]).sum()
    dist.all_reduce(correct)
    return correct.item() / len(data.test)


def describe(
    data: ImageData, model: nn.Module, train_images: int, steps: int, steps_per_epoch: int
) -> Start:
    height, width = data.train.pixels.shape[-2:]
    return Start(
        data=data.name,
        train_images=train_images,
        test_images=len(data.test),
        image_shape=(height, width),
        parameters=sum(p.numel() for p in model.parameters()),
        backend=dist.get_backend(),
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        torch_version=str(torch.__version__),
    )


def tell_by_line(event: Event) -> None:
    print(encode(event), flush=True)


def tell_a_person(event: Event) -> None:
    if isinstance(event, EpochEnd) and dist.get_rank() == 0:
        print(f"epoch {event.epoch}: test accuracy {event.accuracy:.2%}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small convolutional network.")
    parser.add_argument("--data", type=Path, help="directory of IDX files; default: digits")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=120, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--images", type=int, default=10**9, help="train on the first so many")
    parser.add_argument("--hidden", type=int, default=0, help="further layers before the last")
    parser.add_argument("--fsdp", action="store_true", help="fully_shard in place of DDP")
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", action="store_true", help="print JSON lines for `dure demo`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
