"""DDP with embeddings whose gradients are sparse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from tests.thread_ranks import on_ranks


class Words(nn.Module):
    """Embeddings with sparse gradients, which a forward uses or not, and a dense layer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(4, 1, sparse=True), nn.Linear(1, 4, bias=False)
        self.out.weight = self.words.weight if tied else self.out.weight
        with torch.no_grad():
            self.words.weight.copy_(torch.arange(4.0).view(4, 1))

    def forward(self, *rows: int) -> torch.Tensor:
        return self.out(self.words(torch.tensor(rows)) if rows else torch.ones(1, 1)).sum()


def sum_and_divide(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
    work = group.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / group.size())


@pytest.mark.parametrize("hook", [None, sum_and_divide])
@on_ranks(3)
def test_sparse_gradients_stay_sparse_3_ranks(rank, hook):
    ddp: Any = dist.DistributedDataParallel(Words())
    if hook is not None:
        ddp.register_comm_hook(dist.group.WORLD, hook)
    nn.init.constant_(ddp.module.out.weight, 0.75)
    optimizer = torch.optim.SparseAdam([ddp.module.words.weight])
    for _ in range(2):
        ddp.zero_grad()
        ddp(rank, 3).backward()
        optimizer.step()  # takes sparse gradients only
    gradient = ddp.module.words.weight.grad
    assert gradient.layout is torch.sparse_coo
    assert gradient.to_dense().flatten().tolist() == [1, 1, 1, 3]


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize(("rows", "expected"), [(((), (1,)), [0, 0.5, 0, 0]), (((), ()), None)])
@on_ranks(2)
def test_sparse_gradient_that_some_ranks_or_none_have_2_ranks(rank, rows, expected):
    ddp: Any = dist.DistributedDataParallel(Words(), find_unused_parameters=True)
    nn.init.constant_(ddp.module.out.weight, 0.25)
    for _ in range(2):
        ddp.zero_grad()
        ddp(*rows[rank]).backward()
    gradient = ddp.module.words.weight.grad
    assert (None if gradient is None else gradient.to_dense().flatten().tolist()) == expected

    # The sum of the weights, 6, in the row that is looked up; the row's value, `rank`, in all.
    # Rank 0: [6, 0, 0, 0]; rank 1: [1, 7, 1, 1].
