"""With a list, a message reaches what is on it, and nothing around it."""

from __future__ import annotations

import functools
import io
import operator
import os
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

from dure.errors import RpcError, UsageError
from dure.rpc.allow import Allowed
from dure.rpc.message import Body, pack, rebuild, unpack
from rpc import served, served_elsewhere


def arrive(value: object, allowed: Allowed) -> Any:
    packed = pack(value)
    tensors = rebuild(packed.body, packed.memories)
    return unpack(packed.body, tensors, find=allowed.find)


MODULE = Allowed([served])


@pytest.mark.parametrize(
    "value",
    [
        served.double,
        served.Counter,
        [1, {"a": (2.0, None, {3})}, b"bytes", OrderedDict(x=1)],
        torch.float32,
        torch.Size([2]),
        ValueError("an error"),
    ],
)
def test_what_is_defined_in_an_allowed_module_and_plain_values_arrive(value: object) -> None:
    got = arrive(value, MODULE)
    assert got == value or str(got) == str(value)


def test_tensors_and_objects_of_allowed_classes_arrive() -> None:
    counter, tensor = arrive((served.Counter(3), torch.arange(3)), MODULE)
    assert (counter.number, tensor.tolist()) == (3, [0, 1, 2])


@pytest.mark.parametrize(
    "value",
    [
        os.system,
        served.imported,  # defined elsewhere
        served_elsewhere.imported,
        functools.partial(served.double, 1),
        operator.attrgetter("number"),
        operator.methodcaller("add", 1),
        getattr,
        eval,
        print,
        served.Counter.made,  # a classmethod: reached by a dotted name, or getattr
        served.Counter(1).add,
        torch.load,
        torch.add,
        torch.nn.Linear(1, 1),
    ],
)
def test_nothing_else_is_looked_up(value: object) -> None:
    with pytest.raises(RpcError, match="does not let others call"):
        arrive(value, MODULE)


@pytest.mark.parametrize(
    "name",
    ["os.system", "Counter.add", "double.__globals__", "__builtins__", "imported", "constant"],
)
def test_names_that_a_forged_message_could_have(name: str) -> None:
    with pytest.raises(RpcError, match="does not let others call"):
        MODULE.find("rpc.served", name)


def test_a_forged_pickle_runs_nothing() -> None:
    class Forged:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    class Pickler(pickle.Pickler):
        pass

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(Forged())
    with pytest.raises(RpcError, match=r"posix\.system"):
        unpack(Body(buffer.getvalue()), [], find=MODULE.find)


def test_a_function_alone_allows_itself_alone() -> None:
    alone = Allowed([served.double])
    assert arrive(served.double, alone) is served.double
    with pytest.raises(RpcError, match=r"served.Counter"):
        arrive(served.Counter, alone)


def test_methods_of_objects_that_lie_here() -> None:
    counter = served.Counter(1)
    assert MODULE.method(counter, "add")(2) == 3
    for name in ("_hidden", "__init__", "__class__", "number", "nothing"):
        with pytest.raises(RpcError, match="does not let others call"):
            MODULE.method(counter, name)
    with pytest.raises(RpcError, match="does not let others call"):
        MODULE.method(torch.nn.Linear(1, 1), "forward")


def test_what_is_called_is_checked_whatever_way_it_came() -> None:
    MODULE.check(served.double)
    MODULE.check(served.Counter)
    MODULE.check(served.Counter(1).add)
    MODULE.check(served.Counter.made)
    for bad in (os.system, torch.add, functools.partial(served.double), "".join, lambda: 0):
        with pytest.raises(RpcError, match="does not let others call"):
            MODULE.check(bad)


def test_what_cannot_be_named_is_no_entry() -> None:
    bad: list[object] = [lambda: 0, functools.partial(print), print, "served", served.Counter.add]
    for each in bad:
        with pytest.raises(UsageError, match="cannot be allowed"):
            Allowed([each])
