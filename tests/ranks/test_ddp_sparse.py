"""DDP with embeddings whose gradients are sparse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.testing import run_ranks


@pytest.mark.parametrize("hook", [False, True])
def test_sparse_gradients_stay_sparse_3_ranks(hook: bool) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1, bias=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(rows)).sum()

    def sum_up(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        return (
            group.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0] / 3)
        )

    def rank_main(rank: int) -> list[float]:
        ddp = dist.DistributedDataParallel(Words())
        if hook:
            ddp.register_comm_hook(dist.group.WORLD, sum_up)
        ddp.module.out.weight.data.fill_(3)
        optimizer = torch.optim.SparseAdam([ddp.module.words.weight])
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.tensor([rank, 3])).backward()
            optimizer.step()  # takes sparse gradients only
        gradient = ddp.module.words.weight.grad
        assert gradient.layout is torch.sparse_coo
        return gradient.to_dense()[:, 0].tolist()

    assert run_ranks(3, rank_main) == [[1, 1, 1, 3]] * 3


def test_sparse_gradient_of_one_rank_only_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[list[float], Any]:
        module = nn.ModuleDict({"used": nn.Embedding(2, 1, sparse=True)})
        module["unused"] = nn.Embedding(2, 1, sparse=True)

        class Sometimes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.words, self.always = module, nn.Linear(1, 1)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = self.always(x).sum()
                return y + self.words["used"](torch.tensor([1])).sum() if rank else y

        ddp = dist.DistributedDataParallel(Sometimes(), find_unused_parameters=True)
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.ones(1, 1)).backward()
        used, unused = (module.get_parameter(f"{n}.weight").grad for n in ("used", "unused"))
        assert used is not None
        return used.to_dense().flatten().tolist(), unused

    assert run_ranks(2, rank_main) == [([0, 0.5], None)] * 2


def test_weight_with_sparse_and_dense_gradients_is_dense_2_ranks() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(3, 1, sparse=True), nn.Linear(1, 3, bias=False)
            self.out.weight = self.words.weight

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(rows)).sum()

    def rank_main(rank: int) -> list[float]:
        ddp = dist.DistributedDataParallel(Tied())
        ddp.module.words.weight.data.copy_(torch.arange(3.0).view(3, 1))
        ddp(torch.tensor([rank])).backward()
        return ddp.module.words.weight.grad.flatten().tolist()

    # Rank 0: [3, 0, 0]; rank 1: [1, 4, 1].
    assert run_ranks(2, rank_main) == [[2, 2, 0.5]] * 2
