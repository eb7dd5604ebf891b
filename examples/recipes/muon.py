"""Muon with an owner per matrix: each matrix of a sharded model is orthogonalized by one rank.

Muon's update needs the complete matrix: it multiplies the momentum with itself, five times. If all
ranks computed it for all matrices, they would do the same work. Here each matrix has one owner. The
rows of its gradient go from all ranks to the owner, torch's Muon makes the step there, and each
rank receives its rows of the new matrix: two all_to_all per step, for all matrices together. The
owner has a copy of its matrices and their momentum, which no other rank has.

Biases, and in a language model embeddings, head and norms, are left to AdamW, on their shards.

With replicas (DDP) `ZeroRedundancyOptimizer` does this already: it gives each parameter one owner.

The check: one process trains with torch's Muon on complete matrices.

    dure run --nproc 2 examples/recipes/muon.py          (any number that divides 24)
"""

import itertools
from collections.abc import Iterable

import torch
from torch import nn

import dure as dist
from dure.fsdp import fully_shard, stream_full
from dure.tensor import DTensor

STEPS, BATCH = 6, 24
MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}


def unflatten(vector: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy the elements of a vector into tensors, one after another."""
    for tensor, part in zip(tensors, vector.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


class OwnedMuon:
    """Muon for matrices that `fully_shard` has cut by rows, with one owner each.

    Args:
        matrices: The same on all ranks, in the same order.
        options: Of torch's Muon.
    """

    def __init__(self, matrices: list[DTensor], **options: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.owned: list[list[DTensor]] = [[] for _ in range(self.size)]  # by each rank
        loads = [0] * self.size
        for matrix in sorted(matrices, key=lambda m: -m.numel()):  # the largest first
            owner = loads.index(min(loads))
            self.owned[owner].append(matrix)
            loads[owner] += matrix.numel()
        self.full = [nn.Parameter(m.to_local().new_empty(m.shape)) for m in self.owned[self.rank]]
        self.refresh()
        self.muon = torch.optim.Muon(self.full, **options) if self.full else None
        self.empty = matrices[0].to_local().new_empty(0)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy all matrices to their owners: after weights were loaded, too; all ranks call it."""
        copies = dict(zip(self.owned[self.rank], self.full, strict=True))
        for matrix in itertools.chain(*self.owned):
            complete = matrix.full_tensor()
            if matrix in copies:
                copies[matrix].copy_(complete)

    def flat(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return all elements in one vector."""
        return torch.cat([self.empty, *(tensor.flatten() for tensor in tensors)])

    def rows(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the rows of a rank: ceil(rows / size) as with `fully_shard`, the last fewer."""
        count = -(-len(tensor) // self.size)
        return tensor[rank * count : (rank + 1) * count]

    @torch.no_grad()
    def step(self) -> None:
        """Make one step for all matrices; all ranks call it."""
        ranks = range(self.size)
        gradients = [torch.empty_like(full) for full in self.full]
        sent = [self.flat(m.grad.to_local() for m in part) for part in self.owned]
        received = [self.flat(self.rows(g, rank) for g in gradients) for rank in ranks]
        dist.all_to_all(received, sent)
        for rank in ranks:
            unflatten(received[rank], [self.rows(g, rank) for g in gradients])
        for full, gradient in zip(self.full, gradients, strict=True):
            full.grad = gradient
        if self.muon is not None:
            self.muon.step()
        returned = [self.flat(self.rows(full, rank) for full in self.full) for rank in ranks]
        dist.all_to_all(sent, returned)  # the shards are as long as the gradients were
        for part, vector in zip(self.owned, sent, strict=True):
            unflatten(vector, [matrix.to_local() for matrix in part])


def train(model: nn.Module, muon: type, rank: int, size: int) -> list[float]:
    """Train on this rank's rows of each batch; return the losses."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [muon(matrices, **MUON), torch.optim.AdamW(others, lr=1e-3)]
    losses = []
    rows = torch.randn(STEPS, BATCH, 12, generator=torch.Generator().manual_seed(1)).double()
    for batch in rows:
        x = batch.tensor_split(size)[rank]
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def zero(matrices: list[nn.Parameter], **options: float) -> torch.optim.Optimizer:
    """Return Muon for replicas, with an owner per matrix."""
    return dist.ZeroRedundancyOptimizer(matrices, optimizer_class=torch.optim.Muon, **options)


def build() -> nn.Sequential:
    """Return the model, the same on every rank; 9 rows cannot be cut equally by 2."""
    torch.manual_seed(0)
    widths = (12, 20, 9, 16, 4)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh()))).double()


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    alone = build()
    expected = torch.tensor(train(alone, torch.optim.Muon, 0, 1), dtype=torch.double)
    sharded = fully_shard(build())
    replicas = dist.DistributedDataParallel(build())
    for model, muon in ((sharded, OwnedMuon), (replicas, zero)):
        losses = torch.tensor(train(model, muon, rank, size), dtype=torch.double)
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    for name, weight in stream_full(sharded):
        torch.testing.assert_close(weight, alone.state_dict()[name], rtol=1e-9, atol=1e-12)

    if rank == 0:
        print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}, those of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
