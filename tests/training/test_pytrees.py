"""Tensors in nested arguments: found, and replaced."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import torch

from dure.training.pytrees import mapped, tensors_of

Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    """Has a field that its constructor does not take."""

    inputs: torch.Tensor
    label: str
    length: int = field(init=False, default=3)


def test_tensors_are_found_in_their_order_wherever_they_are():
    a, b, c, d = (torch.tensor(i) for i in range(4))
    tree = [a, Pair(b, "text"), {"k": Batch(c, "l")}, ({d},), None, 7]
    assert [int(t) for t in tensors_of(tree)] == [0, 1, 2, 3]


def test_what_is_no_tensor_stays_and_classes_stay():
    tree = {
        "pair": Pair(torch.tensor(1), "text"),
        "ordered": OrderedDict(z=torch.tensor(2), a=None),
        "batch": Batch(torch.tensor(3), "l"),
        "list": [torch.tensor(4), (5,)],
    }
    twice = mapped(tree, lambda t: t * 2)
    assert twice["pair"] == Pair(torch.tensor(2), "text")
    assert type(twice["ordered"]) is OrderedDict
    assert list(twice["ordered"]) == ["z", "a"]
    assert int(twice["ordered"]["z"]) == 4
    assert (int(twice["batch"].inputs), twice["batch"].label, twice["batch"].length) == (6, "l", 3)
    assert twice["list"] == [torch.tensor(8), (5,)]
    assert int(tree["list"][0]) == 4
