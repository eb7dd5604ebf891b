"""Reductions of the plug-in: they are objects, and tensors come in lists."""

from __future__ import annotations

import pytest
import torch

from tests.torch_backend.torch_worlds import in_pool, td, world


def reductions(rank: int, folder: str) -> None:
    with world(rank, folder) as group:
        expected = {"SUM": 6, "AVG": 3, "PRODUCT": 8, "MIN": 2, "MAX": 4}
        for name, value in expected.items():
            tensor = torch.tensor([2.0 + 2 * rank])
            td.all_reduce(tensor, getattr(td.ReduceOp, name))
            assert tensor.item() == value, name
        for name, value in {"BAND": 2, "BOR": 7, "BXOR": 5}.items():
            whole = torch.tensor([3 if rank == 0 else 6])
            td.all_reduce(whole, getattr(td.ReduceOp, name))
            assert whole.item() == value, name
        average = torch.tensor([-3, 2]) - rank  # -7 / 2 and 3 / 2
        td.all_reduce(average, td.ReduceOp.AVG)
        assert average.tolist() == [-3, 1]
        scaled = torch.ones(1)
        sum_with_factor = td._make_nccl_premul_sum(0.5 + rank)
        if hasattr(sum_with_factor, "factor"):  # from torch 2.13 on; else see test_calls.py
            td.all_reduce(scaled, sum_with_factor)
            assert scaled.item() == 2
        z = torch.tensor([1 + 2j])
        td.all_reduce(z)
        assert z.item() == 2 + 4j
        sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (2,))
        td.all_reduce(sparse)
        assert sparse.to_dense().tolist() == [1.0, 1.0]
        strided = torch.ones(2, 3).t()
        td.all_reduce(strided)
        assert strided.tolist() == [[2.0] * 2] * 3
        with pytest.raises(ValueError, match="list of one"):
            group.allreduce([torch.ones(1), torch.ones(1)])


test_reductions = in_pool(reductions)
