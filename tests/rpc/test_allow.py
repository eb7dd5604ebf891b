"""With a list, a message brings plain values, tensors and allowed functions, and nothing else."""

from __future__ import annotations

import datetime
import functools
import operator
import os
from collections import OrderedDict
from typing import Any, cast

import pytest
import torch

from dure.errors import RpcError, UsageError
from dure.rpc.allow import Allowed
from dure.rpc.codec import Body, Codec, ReferenceRow, insert
from dure.rpc.remote_module import _again  # pyright: ignore[reportPrivateUsage]
from dure.rpc.rref import value_type
from dure.rpc.tensors import rebuild
from tests.rpc import served, served_elsewhere

MODULE = Allowed([served])
NESTED = Codec().pack(([],)).body.tensor_at
REFUSED = "does not let others call|accepts only plain values"


class Reference:
    def pack_reference(self, to: int) -> ReferenceRow:
        return ReferenceRow((1, 5), 1, (to, 5))


def arrive(*values: object) -> Any:
    packed = Codec(Reference).pack(values)
    tensors = rebuild(packed.body.tensors, packed.body.inline, packed.memories)
    values = Codec(allowed=MODULE).load(packed.body, tensors, ["reference"])
    return insert(values, packed.body, tensors, ["reference"])


def read(forged: bytes, tensor: torch.Tensor, reference: object) -> Any:
    return Codec(allowed=MODULE).load(
        Body(forged, tensor_at=NESTED), [tensor], references=[reference]
    )


@pytest.mark.parametrize(
    "value",
    [
        served.double,
        served.Counter,
        [1, {"a": (2.0, None, {3}, frozenset({4})), (5, "b"): True}, b"bytes", bytearray(b"more")],
        {"double": served.double},
        -(2**100),
    ],
)
def test_plain_values_and_what_an_allowed_module_defines_arrive(value: object) -> None:
    assert arrive(value, [value]) == (value, [value])


def test_tensors_and_references_arrive_anywhere_in_plain_values() -> None:
    shared = torch.arange(3)
    got = arrive([shared, {"view": shared[1:]}], (shared, {7}), Reference())
    (first, view), (again, numbers), reference = got
    assert again is first
    view["view"] += 1
    assert (first.tolist(), numbers, reference) == ([0, 2, 3], {7}, "reference")
    lone, reference = arrive(torch.ones(1), Reference())
    assert (lone.tolist(), reference) == ([1.0], "reference")


def test_a_list_that_contains_itself_is_refused() -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    with pytest.raises(RpcError, match=REFUSED):
        arrive(circle)


def test_tensors_without_memory_arrive() -> None:
    (meta,) = arrive(torch.empty(2, device="meta"))
    assert (meta.device.type, meta.shape) == ("meta", (2,))


class Forged:
    """Pickled as a call, and as what is done to its result."""

    def __init__(self, *reduced: object) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:TypedStorage", "ignore:Sparse")
@pytest.mark.parametrize(
    "make",
    [
        lambda: os.system,
        lambda: served.imported,  # defined elsewhere
        lambda: served_elsewhere.imported,
        lambda: functools.partial(served.double, 1),
        lambda: operator.attrgetter("number"),
        lambda: operator.methodcaller("add", 1),
        lambda: getattr,
        lambda: eval,
        lambda: served.Counter.made,  # a classmethod: reached by a dotted name, or getattr
        lambda: served.Counter(1).add,
        lambda: served.Counter(1),  # an object, even of an allowed class
        lambda: served.Colour.RED,
        lambda: ValueError("an error"),
        lambda: OrderedDict(x=1),
        lambda: datetime.timedelta(1),
        lambda: torch.load,
        lambda: torch.float32,
        lambda: torch.Size([2]),
        lambda: torch.nn.Linear(1, 1),
        lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 2, torch.quint8),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: _again("worker1", "cpu", cast("Any", None)),  # a RemoteModule
        lambda: 8j,
        lambda: value_type,  # RPC itself calls it, but no pickle names it
        lambda: Forged(os.system, ("true",)),
        lambda: Forged(served.settings, ()),
        lambda: Forged(served.settings, (), {"open": True}),
        lambda: Forged(served.settings, (), None, None, iter([("open", True)])),
        lambda: Forged(served.Counter, (1,)),
        lambda: Forged(served.Colour, ("red",), {"number": 2}),
    ],
)
def test_nothing_else_arrives_and_nothing_is_called(make: Any) -> None:
    with pytest.raises(RpcError, match=REFUSED):
        arrive([make()])
    assert served.settings() == {"open": False}
    assert not hasattr(served.Colour.RED, "number")


class Target:
    """Stands for a reference that a forged pickle tries to change."""

    number = 0

    def append(self, value: object) -> None:
        self.number = 1

    extend = add = __setitem__ = __setstate__ = append  # type: ignore[assignment]


TENSOR = b"cdure.rpc.codec\n_tensor\n(I0\ntR"
REFERENCE = b"cdure.rpc.codec\n_reference\n(I0\ntR"
CLASS = b"ctests.rpc.served\nCounter\n"
FUNCTION = b"ctests.rpc.served\nsettings\n"


@pytest.mark.parametrize("target", [TENSOR, REFERENCE, CLASS, FUNCTION])
@pytest.mark.parametrize(
    "instructions",
    [
        b")R.",  # REDUCE: call it
        b")\x81.",  # NEWOBJ
        b")}\x92.",  # NEWOBJ_EX
        b"I1\na.",  # APPEND
        b"(I1\ne.",  # APPENDS
        b"(I1\n\x90.",  # ADDITEMS
        b"I0\nI2\ns.",  # SETITEM
        b"(I0\nI2\nu.",  # SETITEMS
        b"}S'__doc__'\nS'another'\nsb.",  # BUILD: its attributes
        b"(N}S'__doc__'\nS'another'\nstb.",  # BUILD: its slots
        b"(N}S'value'\nI7\nstb.",  # BUILD: a new slot
    ],
)
def test_a_pickle_has_no_tensor_reference_or_function_in_its_hands(
    target: bytes, instructions: bytes
) -> None:
    tensor, reference = torch.zeros(1), Target()
    before = served.Counter.__doc__, served.settings.__doc__
    with pytest.raises(RpcError, match=REFUSED):
        read(target + instructions, tensor, reference)
    assert (tensor.tolist(), reference.number) == ([0.0], 0)
    assert (served.Counter.__doc__, served.settings.__doc__) == before


@pytest.mark.parametrize(
    "forged",
    [
        b"(ctests.rpc.served\nsettings\no.",  # OBJ
        b"(itests.rpc.served\nsettings\n.",  # INST
        b"\x82\x01.",  # EXT1
        b"cdure.rpc.codec\n_tensor\n.",  # the function that puts tensors in
        b"cdure.rpc.codec\n_tensor\n(I1\ntR.",  # a tensor that the message does not have
        b"cdure.rpc.codec\n_Hole\n.",
        b"Pid\n.",  # PERSID
        b"(" + b"(" * 100_000 + b"t" * 100_001 + b".",  # a tuple of depth 100,000
        b"not a pickle",
    ],
)
def test_forged_instructions_are_refused(forged: bytes) -> None:
    with pytest.raises(RpcError, match=REFUSED):
        read(forged, torch.zeros(1), None)


@pytest.mark.parametrize(
    "name",
    ["os.system", "Counter.add", "double.__globals__", "__builtins__", "imported", "constant"],
)
def test_names_that_a_forged_message_could_have(name: str) -> None:
    with pytest.raises(RpcError, match="does not let others call"):
        MODULE.find("tests.rpc.served", name)


def test_methods_of_objects_that_are_stored_here() -> None:
    counter = served.Counter(1)
    assert MODULE.method(counter, "add")(2) == 3
    for name in ("_hidden", "__init__", "__class__", "number", "nothing"):
        with pytest.raises(RpcError, match="does not let others call"):
            MODULE.method(counter, name)
    with pytest.raises(RpcError, match="does not let others call"):
        MODULE.method(torch.nn.Linear(1, 1), "forward")


def test_what_cannot_be_named_is_no_entry() -> None:
    bad: list[object] = [lambda: 0, functools.partial(print), print, "served", served.Counter.add]
    for each in bad:
        with pytest.raises(UsageError, match="cannot be allowed"):
            Allowed([each])


def test_rpcs_own_functions_are_called_by_name_only() -> None:
    assert MODULE.function("dure.rpc.rref", "value_type") is value_type
    with pytest.raises(RpcError, match="does not let others call that"):
        MODULE.function("dure.rpc.rref", "RRef")
