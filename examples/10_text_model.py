"""A character model of the GPT kind on real text: Python's own sources, found on this machine.

Everything that data parallelism on text needs, in one loop: windows of the text are dealt out by a
`DistributedSampler`; a large batch is made of several small ones under `no_sync()`; gradients are
averaged while backward goes on; a `StepMeter` tells where a step's time goes. At the end the model
writes some Python of its own.

How can one know that it is right? The same steps are made again by one process on the whole batch
(`--no-compare` leaves that out). Both must have the same loss curve, up to the order in which sums
are taken: in float64 to 9 digits, in float32 to 4, since each step builds on the rounding of those
before it.

    dure run --nproc 2 examples/10_text_model.py
    dure run --nproc 2 examples/10_text_model.py --size gpt10m    (10.8 M parameters, minutes)
"""

import argparse
import copy
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import torch
from gpt import GPT, SIZES, continued, next_token_loss
from torch.utils.data import DataLoader

import dure as dist
from dure.data import TextData, load_python_sources

# Steps, sequences a step (of all ranks together), learning rate, dtype, bytes of text.
PLANS = {
    "small": (18, 24, 5e-3, torch.float64, 300_000),
    "gpt10m": (40, 24, 1e-3, torch.float32, 2_000_000),
}
ACCUMULATE = 2  # small batches a step
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
Batch = tuple[torch.Tensor, torch.Tensor]


def deal_out(data: TextData, batch_size: int, rank: int, size: int) -> Iterator[Batch]:
    """Give this rank's share of batch after batch, without end; each epoch in another order."""
    sampler = dist.DistributedSampler(data.train, size, rank, shuffle=True, drop_last=True)
    loader = DataLoader(data.train, batch_size // size, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def accumulating(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context in which backward adds gradients up and averages nothing."""
    return model.no_sync() if isinstance(model, dist.DistributedDataParallel) else nullcontext()


def train(
    model: torch.nn.Module, batches: Iterator[Batch], steps: int, lr: float
) -> tuple[torch.Tensor, dist.StepMeter]:
    """Make so many steps; return the loss of each on this rank's part, and what it took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    meter = dist.StepMeter(model, optimizer, count=lambda batch: batch[0].numel())
    losses = torch.zeros(steps, dtype=torch.float64)
    for number, (inputs, targets) in enumerate(meter.batches(islice(batches, steps * ACCUMULATE))):
        last = (number + 1) % ACCUMULATE == 0
        with accumulating(model) if not last else nullcontext():
            loss = next_token_loss(model(inputs), targets) / ACCUMULATE
            loss.backward()
        losses[number // ACCUMULATE] += loss.detach()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return losses, meter


def alone(model: GPT, data: TextData, steps: int, batch_size: int, lr: float) -> torch.Tensor:
    """Make the same steps on rank 0 alone, on whole batches; return the losses to all ranks."""
    losses = torch.zeros(steps, dtype=torch.float64)
    if dist.get_rank() == 0:
        losses, _ = train(model, deal_out(data, batch_size // ACCUMULATE, 0, 1), steps, lr)
    dist.broadcast(losses, src=0)
    return losses


@torch.no_grad()
def test_loss(model: torch.nn.Module, data: TextData) -> float:
    """Return the loss on some text that was not trained on."""
    windows = [data.test[i] for i in range(32)]
    inputs, targets = (torch.stack(part) for part in zip(*windows, strict=True))
    return next_token_loss(model(inputs), targets).item()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT on Python's own sources.")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    steps, batch_size, lr, dtype, text_bytes = PLANS[options.size]
    steps = options.steps or steps
    dist.init_process_group()
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    if batch_size // ACCUMULATE % size:
        raise SystemExit(f"{batch_size // ACCUMULATE} sequences cannot be shared by {size} ranks")
    data = load_python_sources(SIZES[options.size].context, max_bytes=text_bytes)

    torch.manual_seed(0)
    model = GPT(SIZES[options.size], len(data.vocabulary)).to(dtype)
    first = copy.deepcopy(model)
    ddp = dist.DistributedDataParallel(model)
    begun = time.perf_counter()
    batches = deal_out(data, batch_size // ACCUMULATE, rank, size)
    losses, meter = train(ddp, batches, steps, lr)
    seconds = time.perf_counter() - begun
    dist.all_reduce(losses, dist.ReduceOp.AVG)  # of equal parts: the loss of the whole batch
    report = meter.report()
    if rank == 0:
        tokens = batch_size * SIZES[options.size].context * steps
        print(f"{data.name}: {len(data.train.tokens):,} characters to learn from")
        print(f"{options.size}: {sum(p.numel() for p in model.parameters()):,} parameters")
        print(f"{size} ranks: {tokens / seconds:,.0f} tokens/s; one step:\n{report}")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; new text {test_loss(model, data):.3f}")

    if options.compare:
        expected = alone(first, data, steps, batch_size, lr)
        gap = (losses - expected).abs().max().item()
        if rank == 0:
            print(f"one process on whole batches: {steps} losses, largest difference {gap:.1e}")
        assert gap < TOLERANCE[dtype], f"the curves differ by {gap}"
    assert losses[-1] < 0.8 * losses[0], "nothing was learned"
    if rank == 0:
        start = data.vocabulary.encode("def ").long()
        print(data.vocabulary.decode(continued(model, start, 120)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
