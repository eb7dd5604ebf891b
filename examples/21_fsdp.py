"""A small Llama on text, sharded: every rank has a part of parameters, gradients and AdamW's state.

Two lines make it so: `fully_shard` on each layer, and on the model. Ranks of one host have the
parameters once, in memory that they share, and nothing is gathered; between hosts they would be
gathered a layer at a time.

How can one know that it is right? One process makes the same steps: the losses agree to 9 digits.

    dure run --nproc 2 examples/21_fsdp.py          (any number that divides 24)
"""

import torch
import torch.nn.functional as F
from llama import LENGTH, Llama
from torch import nn

import dure as dist
from dure.data import read_python_sources
from dure.fsdp import fully_shard

STEPS, BATCH = 6, 24


def model() -> Llama:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return Llama().double()


def batches() -> list[torch.Tensor]:
    """Return windows of Python's own sources, [batch, length + 1] for each step."""
    text = read_python_sources(100_000).encode()
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - LENGTH - 1, (STEPS, BATCH), generator=generator)
    return [torch.tensor([list(text[i : i + LENGTH + 1]) for i in row]) for row in starts.tolist()]


def train(net: nn.Module, rank: int, size: int) -> list[float]:
    """Train on this rank's rows of each batch; return the losses."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for tokens in batches():
        mine = tokens.tensor_split(size)[rank]
        scores = net(mine[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    net = model()
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    losses = torch.tensor(train(net, rank, size), dtype=torch.double)
    dist.all_reduce(losses, dist.ReduceOp.AVG)

    alone = model()
    expected = torch.tensor(train(alone, 0, 1), dtype=torch.double)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    if rank == 0:
        held = sum(p.to_local().numel() for p in net.parameters())
        whole = sum(p.numel() for p in alone.parameters())
        print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}, those of one process")
        print(f"this rank trains {held} of {whole} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
