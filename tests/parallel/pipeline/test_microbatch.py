"""How a batch is cut into microbatches, and results are put together."""

from __future__ import annotations

import pytest
import torch

from dure.errors import ShapeError, UsageError
from dure.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks


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
