"""The program that `dure demo` trains with: an ordinary data-parallel PyTorch program.

Every rank runs this file. It builds the same model, takes its share of each batch, and
`DistributedDataParallel` averages the gradients while backward runs, so that after each step all
ranks have the same parameters: those that one process would have after the full batch.

Rank 0 reports (`dure.cli.ranks`): first the facts, then each step with the means of all ranks, and
the end of each epoch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any  # Any: values of JSON

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset

import dure as dist
from dure.data import DistributedSampler, ImageData, load_digits, load_idx
from dure.errors import UsageError

_LEARNING_RATE = 0.02


def build_model(side: int, num_classes: int) -> nn.Sequential:
    """Build a network that maps pixels [n, 1, side, side] to logits [n, classes].

    It has neither dropout nor batch norm, so what it learns does not depend on how a batch is
    divided. The first convolution halves images larger than 16 pixels.
    """
    model = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1, stride=2 if side > 16 else 1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(128, 128, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(3),
        nn.Flatten(),
        nn.Linear(128 * 9, num_classes),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return model


def train(options: argparse.Namespace, data: ImageData) -> None:
    """Train, and report on the way."""
    world_size = dist.get_world_size()
    torch.manual_seed(options.seed)
    model = build_model(data.train.pixels.shape[-1], data.num_classes)
    parameters = sum(p.numel() for p in model.parameters())
    if world_size > 1:
        model = dist.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=_LEARNING_RATE, momentum=0.9, weight_decay=1e-3
    )
    images = Subset(data.train, range(min(options.images, len(data.train))))
    # Dropping the odd images, here and below, gives any number of ranks the same batches.
    sampler = DistributedSampler(images, seed=options.seed, drop_last=True)
    batches = DataLoader(
        images, batch_size=options.batch_size // world_size, sampler=sampler, drop_last=True
    )
    steps = options.epochs * len(batches)
    if not steps:
        raise UsageError(
            "a batch must not be larger than the training set",
            seen=f"--batch-size {options.batch_size}, {len(images)} images",
        )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=steps)
    meter = dist.StepMeter(model, optimizer)
    facts = {"Images": data.name, "Training images": len(images), "Test images": len(data.test)}
    facts |= {"Parameters": parameters, "Backend": dist.get_backend(), "Steps": steps}
    report({"facts": {**facts, "torch": str(torch.__version__)}})
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for pixels, labels in meter.batches(batches):
            loss = F.cross_entropy(model(normalize(pixels)), labels, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter.end_step()  # the exchange of means is not part of the step
            schedule.step()
            took = meter.last
            work = (took.data_wait_s, took.forward_s, took.backward_s, took.exposed_comm_s)
            values = (loss.item(), *work, took.optimizer_s, took.other_s)
            means = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(means, dist.ReduceOp.AVG)
            mean_loss, *phases = means.tolist()
            report({"loss": mean_loss, "phases": phases})
        report({"accuracy": evaluate(model, data)})


def report(event: dict[str, Any]) -> None:
    """Print one line for `dure demo`."""
    if dist.get_rank() == 0:
        print(json.dumps({"dure": event}), flush=True)


def normalize(pixels: torch.Tensor) -> torch.Tensor:
    """Bring pixels from 0 to 1, mostly dark, to a mean near 0 and a deviation near 1."""
    return (pixels - 0.3) / 0.35


@torch.no_grad()
def evaluate(model: nn.Module, data: ImageData) -> float:
    """Return the accuracy on the test images; each rank evaluates its share of them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pixels, labels = (t[rank::world_size] for t in (data.test.pixels, data.test.labels))
    correct = torch.zeros(1, dtype=torch.int64)
    for i in range(0, len(labels), 500):
        guesses = model(normalize(pixels[i : i + 500])).argmax(dim=1)
        correct += (guesses == labels[i : i + 500]).sum()
    dist.all_reduce(correct)
    return correct.item() / len(data.test)


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="Train a small convolutional network.")
    parser.add_argument("--data", type=Path, help="directory of IDX files; default: digits")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=120, help="of all ranks together")
    parser.add_argument("--images", type=int, default=10**9, help="train on the first so many")
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # one core per rank: more ranks, not more threads, make it faster
    dist.init_process_group(options.backend)
    train(options, load_idx(options.data) if options.data else load_digits())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
