"""With a list, a message reaches what is on it, and nothing around it."""

from __future__ import annotations

import functools
import io
import operator
import os
import pickle
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch

from dure.errors import RpcError, UsageError
from dure.rpc.allow import Allowed
from dure.rpc.message import Body, pack, rebuild, unpack
from dure.rpc.remote_module import RemoteModule, _again  # pyright: ignore[reportPrivateUsage]
from dure.rpc.rref import value_type
from tests.rpc import served, served_elsewhere


def arrive(value: object, allowed: Allowed) -> Any:
    packed = pack(value)
    tensors = rebuild(packed.body, packed.memories)
    return unpack(packed.body, tensors, find=allowed.find)


MODULE = Allowed([served])
PICKLED = pack([]).body.place


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


@pytest.mark.filterwarnings("ignore:Sparse")
def test_tensors_without_memory_and_compressed_ones_arrive() -> None:
    """torch's own way to pickle these names functions that check nothing."""
    meta, csr = arrive((torch.empty(2, device="meta"), torch.eye(2).to_sparse_csr()), MODULE)
    assert (meta.device.type, meta.shape, csr.layout) == ("meta", (2,), torch.sparse_csr)
    for name in ("_rebuild_sparse_tensor", "_rebuild_meta_tensor_no_storage"):
        with pytest.raises(RpcError, match="does not let others call"):
            MODULE.find("torch._utils", name)


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
        MODULE.find("tests.rpc.served", name)


def test_a_forged_pickle_runs_nothing() -> None:
    class Forged:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    class Pickler(pickle.Pickler):
        pass

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(Forged())
    with pytest.raises(RpcError, match=r"posix\.system"):
        unpack(Body(buffer.getvalue(), place=PICKLED), [], find=MODULE.find)
    with pytest.raises(pickle.UnpicklingError, match=r"posix\.system is no plain value"):
        unpack(Body(buffer.getvalue()), [], find=MODULE.find)


def test_methods_of_objects_that_lie_here() -> None:
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


@pytest.mark.parametrize("name", ["double", "Counter"])
def test_what_is_allowed_stays_as_it_is_defined(name: str) -> None:
    state = pickle.dumps((None, {"__doc__": "another", "__defaults__": (1,)}), 2)[2:-1]
    pickled = b"c" + served.__name__.encode() + b"\n" + name.encode() + b"\n" + state + b"b."
    before = getattr(served, name).__doc__
    with pytest.raises(pickle.UnpicklingError, match="not to be set"):
        unpack(Body(pickled, place=PICKLED), [], find=MODULE.find)
    assert getattr(served, name).__doc__ == before


class Forged:
    """Pickled as a call, and as what is done to its result."""

    def __init__(self, *reduced: object) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    "forged",
    [
        Forged(served.settings, (), None, None, iter([("open", True)])),
        Forged(served.settings, (), {"open": True}),
        Forged(served.settings, ()),
        Forged(served.Colour, ("red",), {"number": 2}),
    ],
)
def test_a_pickle_does_not_change_what_lives_here(forged: Forged) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"not to be (called|set)"):
        arrive([forged], MODULE)
    assert served.settings() == {"open": False}
    assert not hasattr(served.Colour.RED, "number")


@pytest.mark.parametrize(
    "forged",
    [
        b"ctests.rpc.served\nsettings\n)\x81.",  # NEWOBJ of a function
        b"ctests.rpc.served\nsettings\n)}\x92.",  # NEWOBJ_EX
        b"(ctests.rpc.served\nsettings\no.",  # OBJ
        b"(itests.rpc.served\nsettings\n.",  # INST
        b"\x82\x01.",  # EXT1
        b"ctests.rpc.served\nCounter\nI1\na.",  # APPEND to a class
        b"ctests.rpc.served\nCounter\n(I1\ne.",  # APPENDS
        b"ctests.rpc.served\nCounter\n(I1\n\x90.",  # ADDITEMS
        b"ctests.rpc.served\nCounter\nI1\nI2\ns.",  # SETITEM
        b"ctests.rpc.served\nCounter\n(I1\nI2\nu.",  # SETITEMS
        b"cdure.rpc.message\n_tensor\n(I0\ntRI0\nI2\ns.",  # SETITEM of a tensor
    ],
)
def test_forged_instructions_are_refused(forged: bytes) -> None:
    tensor = torch.zeros(1)
    with pytest.raises(pickle.UnpicklingError, match=r"not to be|do not have"):
        unpack(Body(forged, place=PICKLED), [tensor], find=MODULE.find)
    assert tensor == 0


def test_a_remote_module_arrives_and_nothing_is_called_like_what_makes_it() -> None:
    made = arrive(Forged(_again, ("worker1", "cpu", None)), MODULE)
    assert (type(made), made.on) == (RemoteModule, "worker1")
    with pytest.raises(pickle.UnpicklingError, match="not to be called"):
        arrive([Forged(_again, ("worker1", "cpu", None)), Forged(served.settings, ())], MODULE)


def test_values_of_all_kinds_are_still_filled() -> None:
    counter = served.Counter(4)
    value = [[1, 2], {3, 4}, OrderedDict(a=[5]), {"b": 6}, deque([7]), served.Colour.RED, 8j]
    *got, other, error = arrive([*value, counter, KeyError("nine")], MODULE)
    assert got == value
    assert (other.number, error.args) == (4, ("nine",))


def test_what_rpc_calls_itself_is_named_by_no_pickle() -> None:
    """What it returns, the class of a value for example, could be called in the pickle."""
    with pytest.raises(RpcError, match="does not let others call that"):
        arrive(value_type, MODULE)
    assert MODULE.function("dure.rpc.rref", "value_type") is value_type
    with pytest.raises(RpcError, match="does not let others call that"):
        MODULE.function("dure.rpc.rref", "RRef")


def test_an_object_does_not_pass_for_a_function_of_rpcs_by_its_name() -> None:
    counter: Any = served.Counter(1)
    counter.__name__, counter.__module__ = "call_method", "dure.rpc.rref"
    with pytest.raises(RpcError, match="does not let others call that"):
        MODULE.check(counter)
