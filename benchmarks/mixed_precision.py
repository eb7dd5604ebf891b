"""What mixed precision costs and saves, and DataParallel beside DistributedDataParallel.

One model and one batch a step. With several ranks each takes its part of the batch, once for each
precision; with one rank the whole batch is for one process, plain and in DataParallel's threads.
Contestants take turns of a few steps each; shown are the median and the least time of a step (the
least is what the machine can do when nobody else uses it).

    dure run --nproc 2 benchmarks/mixed_precision.py
    dure run --nproc 1 benchmarks/mixed_precision.py --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

import dure as dist

BF16 = torch.bfloat16
STEPS_A_TURN = 5

Step = Callable[[], None]


def build_model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
    return nn.Sequential(*parts)


def stepper(
    model: nn.Module,
    x: torch.Tensor,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """Make a function that trains one step on the batch `x`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        with around():
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()

    return step


def precisions(make: Callable[[], nn.Module], x: torch.Tensor) -> dict[str, Step]:
    """Make what several ranks run together, each on its part of the batch."""

    def ddp(precision: dist.MixedPrecision | None = None) -> nn.Module:
        return dist.DistributedDataParallel(make(), mixed_precision=precision)

    return {
        "DDP float32": stepper(ddp(), x),
        "DDP autocast bfloat16": stepper(ddp(), x, lambda: torch.autocast("cpu", BF16)),
        "DDP reduce_dtype bfloat16": stepper(ddp(dist.MixedPrecision(reduce_dtype=BF16)), x),
        "DDP param_dtype bfloat16": stepper(ddp(dist.MixedPrecision(param_dtype=BF16)), x),
    }


def threaded(make: Callable[[], nn.Module], x: torch.Tensor, threads: int) -> dict[str, Step]:
    """Make what one process runs on the whole batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        split = dist.DataParallel(make(), threads)
    return {"one process": stepper(make(), x), "DataParallel": stepper(split, x)}


def take_turns(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the times of each contestant's steps, in ms."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            for _ in range(STEPS_A_TURN):
                start = time.perf_counter()
                step()
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64, help="rows of the whole batch")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of one process")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group()
    size = dist.get_world_size()
    torch.set_num_threads(options.threads if size == 1 else 1)
    x = torch.randn(options.rows // size, options.width)

    def make() -> nn.Module:
        return build_model(options.width, options.layers)

    steps = threaded(make, x, options.threads) if size == 1 else precisions(make, x)
    times = take_turns(steps, options.rounds)
    if dist.get_rank() == 0:
        print(f"{options.layers} layers of {options.width}, {options.rows} rows, {size} ranks")
        for name, found in times.items():
            print(f"{name:28} {statistics.median(found):8.2f} ms  (least {min(found):.2f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
