"""A batch that is a DTensor, cut into microbatches and put together."""

from __future__ import annotations

import pytest
import torch

from dure.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from dure.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks


@pytest.mark.parametrize(
    ("rows", "chunks", "sizes"),
    [
        (6, 4, [2, 2, 1, 1]),  # of 3 rows on each rank, 4 microbatches
        (5, 2, [3, 2]),  # one rank has 3 rows, the other 2
        (6, 2, [3, 3]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_rows_of_ranks_that_the_microbatches_do_not_divide_2_ranks(rows, chunks, sizes):
    whole = torch.arange(2.0 * rows).view(rows, 2)
    expected = [[[2.0 * r, 2.0 * r + 1] for r in range(rows)][i:j] for i, j in _ends(sizes)]

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(whole.clone().requires_grad_(), mesh, [Shard(0)])
        args, _ = split_args_kwargs_into_chunks((x,), None, chunks)
        assert [tuple(a[0].placements) for a in args] == [(Shard(0),)] * chunks
        found = [a[0].full_tensor().tolist() for a in args]
        merged = merge_chunks([a[0] * 10.0 for a in args], None)
        assert merged.placements == (Shard(0),)
        merged.sum().backward()
        return found, merged.full_tensor().tolist(), x.grad.full_tensor().tolist()

    for found, merged, grad in run_ranks(2, body):
        assert found == expected
        assert merged == [[20.0 * r, 20.0 * r + 10] for r in range(rows)]
        assert grad == [[10.0, 10.0]] * rows


def _ends(sizes):
    begin = 0
    for size in sizes:
        yield begin, begin + size
        begin += size


def test_rows_that_divide_are_cut_by_each_rank_and_joined_in_order_2_ranks():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(8.0).view(1, 8), mesh, [Shard(1)])
        _, kwargs = split_args_kwargs_into_chunks((), {"x": x}, 2, None, {"x": TensorChunkSpec(-1)})
        first = kwargs[0]["x"].full_tensor().tolist()
        merged = merge_chunks([k["x"] for k in kwargs], TensorChunkSpec(-1))
        same = distribute_tensor(torch.arange(5.0), mesh, [Replicate()])
        args, _ = split_args_kwargs_into_chunks((same,), None, 2)
        return first, merged.full_tensor().tolist(), [a[0].to_local().tolist() for a in args]

    for first, merged, same in run_ranks(2, body):
        assert first == [[0.0, 1.0, 4.0, 5.0]]
        assert merged == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
        assert same == [[0.0, 1.0, 2.0], [3.0, 4.0]]
