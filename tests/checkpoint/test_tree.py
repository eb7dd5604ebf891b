"""State to JSON and back: types and values are kept; what cannot be saved is named."""

from __future__ import annotations

import io
import json
import math
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.checkpoint.tree import decode, encode, merged
from dure.errors import CheckpointMismatch, UsageError

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])]),
)
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.dictionaries(KEYS, inner).map(OrderedDict),
        st.sets(KEYS),
    ),
    max_leaves=12,
)


def there_and_back(value):
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "x", tensors), allow_nan=False)
    return decode(json.loads(text), lambda name: tensors[name])


@settings(max_examples=20)  # each takes a sixth of a second to draw
@given(TREES)
def test_tree_comes_back_as_it_was(value):
    back = there_and_back(value)
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, set | dict | list | tuple)


def test_a_file_in_memory_comes_back_at_its_position():
    file = io.BytesIO()
    torch.save([0.5], file)
    back = there_and_back({"losses": file})["losses"]
    assert back.tell() == file.tell() and back.getvalue() == file.getvalue()
    back.seek(0)
    assert torch.load(back) == [0.5]


def test_a_tensor_is_not_merged_with_a_value():
    tensor = encode({"a": {"b": torch.ones(1)}}, "", {})
    assert merged(tensor, tensor) == tensor
    for other in (1, [], {}):
        with pytest.raises(CheckpointMismatch, match=r"a\.b"):
            merged(tensor, {"a": {"b": other}})


T = torch.ones(1)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2], [3, 4, 5], [1, 2]),
        ([1, 2, 3], [4], [1, 2, 3]),
        ([], [1], []),
        ((1, 2), (3,), (1, 2)),
        ([[1], 2], [[1, 2]], [[1], 2]),
        ([{"a": 1}], [{"b": 2}], [{"a": 1, "b": 2}]),
        (({"a": 1}, 1), ({"b": 2}, 2), ({"a": 1, "b": 2}, 1)),
        ([{"a": 1}], [{"b": 2}, {"c": 3}], [{"a": 1}]),
        ([[{}], 1], [[{"b": 2}], 2], [[{"b": 2}], 1]),
        ([T], [T, T], ["x.0"]),
        ((T, 1), (T, 2, 3), ("x.0", 1)),
        (None, 3, None),
        (None, {"a": 1}, None),
        ({1, 2}, {3}, {1, 2}),
    ],
)
def test_of_what_differs_the_first_is_kept_complete(first, second, expected):
    noted = []
    trees = [encode({"x": value}, "", {}) for value in (first, second)]
    found = merged(*trees, lambda *what: noted.append(what))
    assert decode(found, str) == {"x": expected}
    assert noted and all(keys[0] == "x" for keys, _, _ in noted)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0])
def test_unusual_numbers_come_back(value):
    assert repr(there_and_back([value])) == repr([value])


class Word(str):
    """A string of a type of its own."""


class Data(bytes):
    """Bytes of a type of their own."""


class Color(StrEnum):
    """An enum whose members are strings."""

    RED = "red"


class Level(IntEnum):
    """An enum whose members are numbers."""

    LOW = 1


AS_SAVED = [
    bytearray(b"\0ab"),
    b"ab",
    np.str_("word"),
    np.str_(""),
    np.complex128(1 + 2j),
    np.float64(0.5),
    np.bool_(True),
    1 + 2j,
    torch.__version__,
    defaultdict(list, a=[1]),
    defaultdict(None, a=1),
    defaultdict(int, {("a", 1): 2}),
    Counter({5: 2}),
]


@pytest.mark.parametrize("value", AS_SAVED, ids=repr)
def test_values_come_back_with_their_type(value):
    for holder in (value, [value], {"x": (value,)}, {"x": {1: value}}):
        back = there_and_back(holder)
        assert back == holder and repr(back) == repr(holder)
    back = there_and_back(value)
    assert type(back) is type(value)
    assert getattr(back, "default_factory", 0) is getattr(value, "default_factory", 0)


REFUSED = {
    "string": Word("a"),
    "bytes": Data(b"a"),
    "enum of strings": Color.RED,
    "enum of numbers": Level.LOW,
    "masked array": np.ma.array([1, 2], mask=[True, False]),
    "date": np.datetime64("2020-01-01"),
    "factory": defaultdict(lambda: 1),
    "function": lambda: None,
    "object": object(),
    "module": torch.nn.Linear(1, 1),
    "sparse tensor": torch.ones(2).to_sparse(),
    "tensor in a set": {torch.ones(2)},
    "tensor without memory": torch.ones(2, device="meta"),
    "array of texts": np.array(["a"]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_values_that_would_not_come_back_as_they_are_are_refused_by_name(what):
    value = REFUSED[what]
    for holder, path in [({"a": [value]}, r"a\.0"), ({"a": {"b": value}}, r"a\.b")]:
        with pytest.raises(UsageError, match=path) as caught:
            encode(holder, "", {})
        assert caught.value.fix


@dataclass
class Pair:
    left: object
    right: object = 2


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: object
    rate: float = 0.5


@dataclass
class Named(str):
    text: str = ""


class WithSlot(Frozen):
    __slots__ = ("extra",)

    def __init__(self, inner):
        super().__init__(inner)
        object.__setattr__(self, "extra", 2)


def _within_itself():
    pair = Pair(1)
    pair.left = pair
    return pair


def _with_more():
    pair = Pair(1)
    pair.more = 3
    return pair


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Pair(object()), r"a\.left is"),
        (_with_more(), "a is"),
        (Named("x"), "a is"),
        (object.__new__(Frozen), "a is"),
        (_with_more(), "'more', which is not a field"),
        (WithSlot(1), r"'extra', which is not a field"),
        ([_within_itself()], r"a\.0\.left is the Pair"),
        ({Frozen(1)}, r"a\.0 is"),
        ({(Frozen(1),): 2}, r"a\.\(key\)\.0 is"),
    ],
)
def test_a_dataclass_that_fields_do_not_describe_is_refused_by_name(value, path):
    with pytest.raises(UsageError, match=path):
        encode({"a": value}, "", {})


CRAFTED = {
    "no base64": {"$": "bytes", "v": "%%%%"},
    "short base64": {"$": "bytearray", "v": "YWI"},
    "file without a position": {"$": "BytesIO", "v": ["YWI=", "0"]},
    "file before its begin": {"$": "BytesIO", "v": ["YWI=", -1]},
    "array of no base64": {"$": "array", "v": ["|u1", [0], "!"]},
    "array of an inferred shape": {"$": "array", "v": ["|u1", [-1], "YWI="]},
    "array of objects": {"$": "array", "v": ["|O", [0], ""]},
    "dtype": {"$": "dtype", "v": "nn"},
    "number": {"$": "float", "v": "one"},
    "pairs of letters": {"$": "map", "v": ["ab"]},
    "unknown kind": {"$": "no", "v": []},
    "factory": {"$": "defaultdict", "v": [], "factory": "eval"},
}


@pytest.mark.parametrize("node", CRAFTED.values(), ids=CRAFTED)
def test_what_was_not_written_by_encode_is_refused_by_name(node):
    nested = {"a": [1, {"$": "tuple", "v": [{"$": "map", "v": [[2, 3], ["b", node]]}]}]}
    with pytest.raises(ValueError, match=r"'a\.1\.0\.b'"):
        decode(nested, str)


def test_an_array_comes_back():
    value = np.arange(6, dtype=np.uint32).reshape(2, 3)
    back = there_and_back(value)
    assert back.dtype == np.uint32 and (back == value).all()


def test_tensors_are_taken_out_by_path_and_tied_ones_once():
    weight, tensors = torch.ones(2, 2), {}
    tree = encode({"a": [weight, weight.t()], "b": {"c": weight}}, "m", tensors)
    assert list(tensors) == ["m.a.0", "m.a.1"]
    assert tree["b"]["c"] == tree["a"][0]


def test_a_conjugate_of_the_same_memory_is_not_tied_to_it():
    weight, tensors = torch.tensor([1 + 2j]), {}
    encode({"a": weight, "b": weight.conj()}, "m", tensors)
    assert [t.item() for t in tensors.values()] == [1 + 2j, 1 - 2j]
