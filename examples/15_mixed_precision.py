"""Mixed precision: compute in 16 bits, keep what must be exact in 32.

float16 has few exponents: gradients underflow, so the loss is multiplied by a scale first, and a
scale that is too large overflows. A step with an inf in it must be skipped, *by all ranks*, or
their models and scales part for good. `dure.GradScaler` agrees about it in one message of 96 bytes.
Here the last rank has such an overflow on purpose, in a parameter that DDP does not average.

bfloat16 has the exponents of float32: no scale is needed. `dure.MixedPrecision` lets DDP compute
with bfloat16 copies of its float32 parameters, and send gradients with half the bytes.

    dure run --nproc 2 examples/15_mixed_precision.py
"""

import time

import torch
from torch import nn

import dure as dist
from dure.data import Images, load_digits
from dure.testing import CommRecorder

STEPS, BATCH, LR, OVERFLOW_AT = 120, 32, 0.02, 40


class Classifier(nn.Module):
    """Two layers that all ranks share, and a bias for each rank's own data."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10))
        self.own_bias = nn.Parameter(torch.zeros(10))
        self._ddp_params_and_buffers_to_ignore = ["own_bias"]

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, 10]."""
        return self.shared(pixels) + self.own_bias


def build_model(precision: dist.MixedPrecision | None = None) -> dist.DistributedDataParallel:
    torch.manual_seed(0)
    return dist.DistributedDataParallel(Classifier(), mixed_precision=precision)


def batch_of(data: Images, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of the batch of a step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(7))[rank::size]
    chosen = order[torch.arange(step * BATCH, (step + 1) * BATCH) % len(order)]
    return data.pixels[chosen], data.labels[chosen]


def train_with_scaler(data: Images) -> tuple[nn.Module, list[float]]:
    """Train with float16 autocast; return the model and the scale after each step."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scaler = dist.GradScaler("cpu", init_scale=2.0**10, growth_interval=30)
    last = dist.get_rank() == dist.get_world_size() - 1
    scales: list[float] = []
    for step in range(STEPS):
        pixels, labels = batch_of(data, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = model(pixels)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        scaler.scale(loss).backward()
        if step == OVERFLOW_AT and last:
            model.module.own_bias.grad[0] = float("inf")
        scaler.unscale_(optimizer)  # the ranks agree here
        nn.utils.clip_grad_norm_(model.module.shared.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, scales


def train(data: Images, precision: dist.MixedPrecision | None) -> tuple[nn.Module, int, float]:
    """Train with DDP alone; return the model, the bytes of a step's reductions, and ms a step."""
    model = build_model(precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    sent, start = 0, time.perf_counter()
    for step in range(STEPS):
        pixels, labels = batch_of(data, step)
        optimizer.zero_grad()
        with CommRecorder() as recorder:
            nn.functional.cross_entropy(model(pixels).float(), labels).backward()
        sent = recorder.nbytes("all_reduce")
        optimizer.step()
    return model, sent, (time.perf_counter() - start) / STEPS * 1e3


def accuracy(model: nn.Module, test: Images) -> float:
    with torch.no_grad():
        return (model(test.pixels).argmax(1) == test.labels).float().mean().item()


def assert_ranks_agree(model: nn.Module, scales: list[float]) -> None:
    """Check that all ranks went through the same scales and share the same weights, bit by bit."""
    mine = (scales, [p.tolist() for p in model.module.shared.parameters()])
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    assert all(theirs == mine for theirs in everybodys), "the ranks went different ways"


def main() -> None:
    dist.init_process_group()
    torch.set_num_threads(1)
    digits = load_digits()

    model, scales = train_with_scaler(digits.train)
    assert_ranks_agree(model, scales)
    assert scales[OVERFLOW_AT] == scales[OVERFLOW_AT - 1] / 2, "the step must have been skipped"
    results = [("float16 autocast + GradScaler", 0, 0.0, accuracy(model, digits.test))]

    bf16 = torch.bfloat16
    for name, precision in {
        "float32": None,
        "bfloat16 reductions": dist.MixedPrecision(reduce_dtype=bf16),
        "bfloat16 compute and reductions": dist.MixedPrecision(param_dtype=bf16),
    }.items():
        model, sent, milliseconds = train(digits.train, precision)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        results.append((name, sent, milliseconds, accuracy(model, digits.test)))
    assert results[2][1] == results[3][1] == results[1][1] // 2

    if dist.get_rank() == 0:
        print(f"rank {dist.get_world_size() - 1} overflowed in step {OVERFLOW_AT}: all skipped it;")
        print(f"scale {scales[OVERFLOW_AT - 1]:g} -> {scales[OVERFLOW_AT]:g} -> {scales[-1]:g}\n")
        print(f"{'precision':32}  bytes a step  ms a step  test accuracy")
        for name, sent, milliseconds, reached in results:
            columns = f"{sent:12}  {milliseconds:9.2f}" if sent else " " * 23
            print(f"{name:32}  {columns}  {reached:13.1%}")
    assert all(reached > 0.85 for _, _, _, reached in results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
