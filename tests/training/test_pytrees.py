"""Tensors in nested arguments: found, and replaced."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import pytest
import torch

from dure.training.pytrees import cast_floats, mapped, tensors_of

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


@dataclass
class Output(OrderedDict[str, Any]):
    """Items that are fields as well; as transformers' `ModelOutput`, not to be updated."""

    logits: torch.Tensor
    states: tuple[torch.Tensor, ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            OrderedDict.__setitem__(self, each.name, getattr(self, each.name))

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("not to be updated")

    def __reduce__(self) -> Any:
        return type(self), (self.logits, self.states)


class Tagged(dict[str, Any]):
    """Has an attribute that is an item, and one that is none; takes an argument."""

    def __init__(self, tag: str, loss: torch.Tensor) -> None:
        super().__init__(loss=loss)
        self.tag, self.loss = tag, loss


def test_a_dict_that_refuses_update_is_cast_with_its_attributes():
    given = Output(torch.tensor([1.0]), (torch.tensor([2.0]),))
    cast = cast_floats(given, torch.float64)
    assert type(cast) is Output
    assert cast["logits"].dtype == cast.logits.dtype == torch.float64
    assert cast["states"][0].dtype == cast.states[0].dtype == torch.float64
    assert given["logits"].dtype == given.logits.dtype == torch.float32
    tagged = cast_floats(Tagged("a", torch.tensor(1.0)), torch.float64)
    assert (tagged.tag, tagged.loss.dtype) == ("a", torch.float64)
    assert tagged["loss"] is tagged.loss


def test_user_dicts_and_defaultdicts_are_cast():
    given: Any = UserDict(pixels=torch.tensor(1.0), ids=torch.tensor(2))
    cast = cast_floats(given, torch.float64)
    assert type(cast) is UserDict
    assert (cast["pixels"].dtype, cast["ids"].dtype) == (torch.float64, torch.int64)
    assert given["pixels"].dtype == torch.float32
    many = defaultdict(list, a=[torch.tensor(1.0)])
    assert cast_floats(many, torch.float64)["other"] == []


@pytest.mark.parametrize(
    "value", [[], {}, [1, (2,)], {"a": [torch.tensor(1)]}, Batch(torch.tensor(1), "l")], ids=str
)
def test_containers_without_a_change_are_returned_themselves(value: Any):
    """What a module writes into them reaches its caller."""
    outer = [value, torch.tensor(1.0)]
    cast = cast_floats(outer, torch.float64)
    assert cast[0] is value
    assert cast[1].dtype == torch.float64
    assert mapped(value, lambda t: t, copies=True) is not value
