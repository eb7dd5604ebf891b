"""One copy of the weights and one of the optimizer's state, whatever the number of ranks.

Plain data parallelism keeps on each rank the weights, the gradients and AdamW's two moments, and
makes every update on every rank. Here the optimizer is sharded (`ZeroRedundancyOptimizer`): a rank
updates, and keeps the moments of, its part of the parameters. And with host_shared_parameters=True
the ranks of a host have one copy of the weights between them, in which each updates its part.

The program trains a small GPT on Python's own sources with three optimizers, one after another:
not sharded, sharded, sharded with shared weights. The losses must be the same to the last bit; what
each rank keeps is shown. At the end the state is brought together and given to an ordinary AdamW.

    dure run --nproc 2 examples/11_sharded_optimizer.py
"""

import copy
from collections.abc import Callable, Iterator

import torch
from gpt import GPT, SIZES, next_token_loss

import dure as dist
from dure.data import TextData, load_python_sources

STEPS, BATCH = 8, 4
MIB = 1 << 20
Maker = Callable[[GPT], torch.optim.Optimizer]


def batches(data: TextData, rank: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Go through this rank's batches: of every `size`-th window, BATCH at a time."""
    for step in range(STEPS):
        places = [(step * BATCH + i) * size + rank for i in range(BATCH)]
        inputs, targets = zip(*(data.train[place] for place in places), strict=True)
        yield torch.stack(inputs), torch.stack(targets)


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Go through the tensors of the state that this rank keeps."""
    for entry in optimizer.state.values():
        yield from (value for value in entry.values() if isinstance(value, torch.Tensor))


def train(
    model: GPT, make: Maker, data: TextData, rank: int, size: int
) -> tuple[list[float], torch.optim.Optimizer]:
    """Make STEPS steps under DDP; return this rank's losses and the optimizer."""
    optimizer = make(model)
    ddp = dist.DistributedDataParallel(model)
    losses = []
    for inputs, targets in batches(data, rank, size):
        loss = next_token_loss(ddp(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def plain(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def sharded(model: GPT) -> torch.optim.Optimizer:
    return dist.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)


def shared(model: GPT) -> torch.optim.Optimizer:
    return dist.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=3e-3, host_shared_parameters=True
    )


def main() -> None:
    dist.init_process_group()
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    data = load_python_sources(SIZES["small"].context, max_bytes=200_000)
    torch.manual_seed(0)
    first = GPT(SIZES["small"], len(data.vocabulary))

    makers: list[Maker] = [plain, sharded]
    if dist.get_backend() not in ("gloo", "mpi"):  # there ranks only exchange messages
        makers.append(shared)
    curves, states = [], []
    for make in makers:
        model = copy.deepcopy(first)
        losses, optimizer = train(model, make, data, rank, size)
        state = sum(t.nbytes for t in tensors_of(optimizer))
        weights = sum(p.nbytes for p in model.parameters())
        curves.append(losses)
        states.append(state)
        if rank == 0:
            copies = 1 if make is shared else size
            print(
                f"{make.__name__:8s} loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
                f"state of this rank {state / MIB:.2f} MiB, "
                f"weights of all ranks {copies * weights / MIB:.2f} MiB"
            )
    assert all(curve == curves[0] for curve in curves), "the optimizers do not agree"
    assert max(states[1:]) <= states[0] / size * 1.3, "the state is not divided evenly"

    # Saving: the parts come together on rank 0, in the form of the unsharded optimizer's state.
    assert isinstance(optimizer, dist.ZeroRedundancyOptimizer)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        ordinary = plain(copy.deepcopy(model))
        ordinary.load_state_dict(optimizer.state_dict())
        total = sum(t.nbytes for t in tensors_of(ordinary))
        print(f"brought together: {total / MIB:.2f} MiB, taken by an ordinary AdamW")
        assert total == states[0]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
