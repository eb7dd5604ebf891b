"""A small Llama on text, in a pipeline: every rank has some of the layers.

The batch is cut into microbatches. While one rank works on the second, the next has the first. Two
schedules: 1F1B with one stage a rank, and ZB-V with two, where backward is split in two halves so
that no rank waits for long.

How can one know that it is right? One process makes the same steps: the losses agree to 9 digits.

    dure run --nproc 2 examples/23_pipeline.py          (up to 4)
"""

import torch
import torch.nn.functional as F
from llama import LENGTH, Layer, Llama
from torch import nn

import dure as dist
from dure.data import read_python_sources
from dure.pipelining import PipelineOptions, PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

STEPS, MICROBATCHES, ROWS = 4, 6, 2


class Part(nn.Module):
    """Some of a model's layers; the embedding comes before the first, the output after the last."""

    def __init__(self, model: Llama, index: int, of: int) -> None:
        super().__init__()
        layers = list(model.layers)
        first, last = index * len(layers) // of, (index + 1) * len(layers) // of
        self.embed = model.embed if index == 0 else None
        self.layers = nn.ModuleList(layers[first:last])
        self.norm, self.head = (model.norm, model.head) if index == of - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens [n, t], or what the last part returned, to what the next one takes."""
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def model() -> Llama:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    net = Llama()
    net.layers = nn.ModuleList(Layer() for _ in range(8))
    return net.double()


def batches() -> list[torch.Tensor]:
    """Return windows of Python's own sources, [batch, length + 1] for each step."""
    text = read_python_sources(100_000).encode()
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, MICROBATCHES * ROWS)
    starts = torch.randint(len(text) - LENGTH - 1, shape, generator=generator)
    return [torch.tensor([list(text[i : i + LENGTH + 1]) for i in row]) for row in starts.tolist()]


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def train_alone() -> list[float]:
    """Train on one rank, a microbatch after the other; return the losses."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for tokens in batches():
        each = []
        for rows in tokens.chunk(MICROBATCHES):
            loss = loss_of(net(rows[:, :-1]), rows[:, 1:])
            (loss / MICROBATCHES).backward()
            each.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(each) / MICROBATCHES)
    return losses


def train_in_stages(indices: list[int], of: int) -> list[float]:
    """Train these of the model's stages on this rank; return the losses, which all ranks know."""
    net, options = model(), PipelineOptions(losses_everywhere=True)
    stages = [PipelineStage(Part(net, i, of), i, of, torch.device("cpu")) for i in indices]
    if len(stages) == 1:
        schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_of, options=options)
    else:
        schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_of, options=options)
    optimizer = torch.optim.AdamW((p for s in stages for p in s.submod.parameters()), lr=3e-3)
    losses = []
    for tokens in batches():
        each: list[torch.Tensor] = []
        inputs = [tokens[:, :-1]] if 0 in indices else []
        schedule.step(*inputs, target=tokens[:, 1:], losses=each, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(each).mean().item())
    return losses


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = torch.tensor(train_alone())
    plans = {"1F1B": ([rank], size), "ZB-V": ([rank, 2 * size - 1 - rank], 2 * size)}
    for name, (indices, of) in plans.items():
        losses = torch.tensor(train_in_stages(indices, of))
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
        if rank == 0:
            told = " ".join(f"{loss:.3f}" for loss in losses.tolist())
            print(f"{name}, {of} stages on {size} ranks: losses {told}, as of one process")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
