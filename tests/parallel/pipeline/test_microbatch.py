"""What travels: how a batch is cut, results are put together, and objects are taken apart."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from dure.errors import ShapeError, UsageError
from dure.parallel.pipeline.layout import pack, unpack
from dure.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from dure.tensor import Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks


def test_chunks_of_arguments_and_results():
    x = torch.arange(10).view(5, 2)
    args, kwargs = split_args_kwargs_into_chunks(
        (x, [x, "s"]), {"k": x}, 2, None, {"k": TensorChunkSpec(1)}
    )
    assert [a[0].tolist() for a in args] == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert args[1][1][1] == "s"
    assert [k["k"].tolist() for k in kwargs] == [
        [[0], [2], [4], [6], [8]],
        [[1], [3], [5], [7], [9]],
    ]
    merged = merge_chunks([{"a": a[0], "b": 1, "c": torch.tensor(2.0)} for a in args], None)
    assert torch.equal(merged["a"], x) and merged["b"] == 1
    assert merged["c"].tolist() == [2.0, 2.0]
    with pytest.raises(ShapeError):
        split_args_kwargs_into_chunks((x,), None, 6)
    with pytest.raises(UsageError):
        merge_chunks([{"a": 1}, {"a": 2}], None)


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


@dataclass
class Unknown:
    """Of a class that torch's pytrees do not know."""

    x: torch.Tensor


def test_an_object_whose_gradients_would_be_lost_is_refused():
    with pytest.raises(UsageError, match="Unknown"):
        pack((Unknown(torch.ones(1, requires_grad=True)),))


def test_an_object_without_gradients_travels():
    (found,) = unpack(pack((Unknown(torch.ones(1)),)))
    assert found.x.tolist() == [1.0]
