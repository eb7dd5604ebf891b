"""Arguments cut into parts, and results joined."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from dure.errors import ShapeError, UsageError
from dure.parallel.dp import gather, scatter
from tests.parallel.dp.wrapped import parallel


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Record:
    value: torch.Tensor
    name: None = None


class Structured(nn.Module):
    def forward(self, x: torch.Tensor, more: dict[str, Any]) -> Any:
        return OrderedDict(
            pair=Pair(x, x + 1), items=[x, (more["y"], None)], record=Record(x * 2), n=more["k"]
        )


def test_nested_arguments_and_results_are_cut_and_joined() -> None:
    x, y, k = torch.arange(6.0).reshape(3, 2), torch.arange(3), torch.tensor([7, 8])
    result = parallel(Structured())(x, more={"y": y, "k": k, "text": "whole"})
    assert isinstance(result, OrderedDict)
    assert isinstance(result["pair"], Pair)
    assert torch.equal(result["pair"].right, x + 1)
    assert torch.equal(result["items"][1][0], y)
    assert result["items"][1][1] is None
    assert torch.equal(result["record"].value, x * 2)
    assert torch.equal(result["n"], k)


def test_arguments_of_different_batch_sizes_are_refused() -> None:
    with pytest.raises(ShapeError):
        scatter((torch.ones(4, 2), {"y": torch.ones(1), "k": torch.ones(4)}), 2)
    with pytest.raises(ShapeError):
        scatter(torch.ones(4, 2), 2, dim=2)


@pytest.mark.parametrize(
    "outputs",
    [
        [{"a": torch.ones(1)}, {"b": torch.ones(1)}],
        [[torch.ones(1)], [torch.ones(1)] * 2],
        [torch.ones(1), None],
        [3, 3],
    ],
)
def test_results_that_do_not_fit_are_refused(outputs: list[Any]) -> None:
    with pytest.raises(UsageError):
        gather(outputs, "cpu")
