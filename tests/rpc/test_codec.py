"""What is packed is unpacked: tensors of every kind, memory that they share, references."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dure import native
from dure.errors import RpcError
from dure.rpc.allow import Allowed
from dure.rpc.codec import Body, Codec, Packed, ReferenceRow, insert
from dure.rpc.tensors import TensorRow, rebuild


def arrive(packed: Packed, *references: object) -> Any:
    """Unpack values, memory copied."""
    body, memories = packed.body, [memory.clone() for memory in packed.memories]
    tensors = rebuild(body.tensors, body.inline, memories)
    return insert(Codec().load(body, tensors, references), body, tensors, references)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*quantize", "ignore:TypedStorage")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).reshape(2, 3),
        lambda: torch.arange(6).reshape(2, 3).t(),
        lambda: torch.arange(24)[3:20:2],
        lambda: torch.arange(4.0).expand(3, 4),
        lambda: torch.tensor(7, dtype=torch.int16),
        lambda: torch.empty(0, 5, dtype=torch.bfloat16),
        lambda: torch.empty(0)[0:0],
        lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
        lambda: torch.tensor([True, False]),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.sparse_csr_tensor([0, 1, 2], [1, 0], [3.0, 4.0], (2, 2)),
        lambda: torch.nn.Parameter(torch.eye(2).to_sparse()),
        lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 2, torch.quint8),
        lambda: torch.arange(2.0, requires_grad=True),
        lambda: torch.nn.Parameter(torch.arange(2.0), requires_grad=False),
        lambda: torch.empty(3, 2, device="meta", requires_grad=True).t().detach(),
    ],
)
def test_tensors_of_every_kind(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    got = arrive(Codec().pack(({"one": [tensor]},)))[0]["one"][0]
    assert (type(got), got.dtype, got.shape) == (type(tensor), tensor.dtype, tensor.shape)
    assert (got.layout, got.requires_grad) == (tensor.layout, tensor.requires_grad)
    if tensor.device.type != "meta":
        same = (got.to_dense() if got.layout != torch.strided else got).detach()
        wanted = (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach()
        assert torch.equal(same, wanted)


def test_a_sparse_tensor_with_wild_indices_is_refused_before_it_is_used() -> None:
    sparse = torch.eye(2).to_sparse()
    sparse._indices().fill_(10**12)
    packed = Codec().pack(([sparse],))
    with pytest.raises(RuntimeError):
        arrive(packed)


def test_shared_memory_is_shared_and_what_nobody_sees_stays() -> None:
    whole = torch.zeros(1000, dtype=torch.float64)
    left, right = whole[100:110], whole[105:120]
    packed = Codec().pack((left, right, left))
    assert [memory.numel() for memory in packed.memories] == [120 * 8 - 100 * 8 // 64 * 64]
    a, b, again = arrive(packed)
    assert a is again
    a += 1
    assert b.tolist() == [1.0] * 5 + [0.0] * 10
    assert whole.sum() == 0


@pytest.mark.parametrize("allowed", [None, Allowed([Body])], ids=["all", "list"])
def test_what_was_received_goes_when_nobody_has_it(allowed: Allowed | None) -> None:
    packed = Codec().pack(([torch.ones(4)],))
    memory = packed.memories[0].clone()
    gone = weakref.ref(memory.untyped_storage())
    gc.disable()  # the memory is a sender's: it must not wait for a collection
    try:
        tensors = rebuild(packed.body.tensors, b"", [memory])
        got = Codec(allowed=allowed).load(packed.body, tensors)
        del tensors
        assert got[0][0].sum() == 4.0
        del got, memory
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("bad", [lambda: None, torch.futures.Future(), (n for n in "x")])
def test_what_cannot_be_sent_is_refused_with_the_reason(bad: object) -> None:
    with pytest.raises(RpcError, match="cannot be sent") as raised:
        Codec().pack(({"deep": [bad]},))
    assert str(raised.value.__cause__).split("\n")[0][:20] in str(raised.value)


@dataclass
class Reference:
    number: int

    def pack_reference(self, to: int) -> ReferenceRow:
        return ReferenceRow((1, self.number), 1, (to, self.number))


def test_references_are_told_beside_the_pickle() -> None:
    packed = Codec(Reference).pack(([Reference(5), (Reference(6), 1)],), to=9)
    assert packed.body.references == (
        ReferenceRow((1, 5), 1, (9, 5)),
        ReferenceRow((1, 6), 1, (9, 6)),
    )
    assert arrive(packed, "a", "b") == (["a", ("b", 1)],)


def test_references_of_values_that_cannot_be_sent_are_taken_back() -> None:
    rows: list[ReferenceRow] = []
    with pytest.raises(RpcError, match="cannot be sent"):
        Codec(Reference, rows.extend).pack(([Reference(5), lambda: None],), to=9)
    assert rows == [ReferenceRow((1, 5), 1, (9, 5))]


T, R = torch.arange(3.0), Reference(5)


@pytest.mark.parametrize(
    "values",
    [(), (T, R), (R, 7, T), (7, T, None, R), ("seven", T), (T,), (R,), (7, 7.0, R), (T, R, [], T)],
)
def test_tensors_and_references_beside_plain_values(values: tuple[Any, ...]) -> None:
    packed = Codec(Reference).pack(values, 3)
    number = sum(value is R for value in values)
    assert packed.body.references == (ReferenceRow((1, 5), 1, (3, 5)),) * number
    got = arrive(packed, "reference")
    assert len(got) == len(values)
    for each, value in zip(got, values, strict=True):
        if value is T:
            assert each.tolist() == [0.0, 1.0, 2.0]
        else:
            assert each == ("reference" if value is R else value)


FITS = TensorRow(0, "float32", (2,), (1,), 0)


@pytest.mark.parametrize(
    "row",
    [
        TensorRow(0, "float32", (5,), (1,), 0),
        TensorRow(0, "float32", (2,), (1,), 3),
        TensorRow(0, "float32", (2,), (-1,), 1),
        TensorRow(0, "float32", (2,), (1,), -1),
        TensorRow(0, "float32", (2, 2), (1,), 0),
        TensorRow(0, "nn", (2,), (1,), 0),
        TensorRow(0, "float64", (2**40,), (2**40,), 0),
    ],
)
def test_rows_that_do_not_fit_are_refused(row: TensorRow) -> None:
    with pytest.raises(ValueError, match="tensor"):
        rebuild((FITS, row), b"", [torch.zeros(16, dtype=torch.uint8)])


PACKED = native.pack_tensor(torch.ones(2, 3), 64, False) or b""


@pytest.mark.parametrize(
    "inline",
    [
        PACKED[:3],
        PACKED[:12],
        PACKED[:-1],
        PACKED + b"0",
        b"\0\xff" + PACKED[2:],
        PACKED[:4] + (2**62).to_bytes(8, "little") + PACKED[12:],
        PACKED[:4] + (-2).to_bytes(8, "little", signed=True) + PACKED[12:],
    ],
)
def test_bytes_that_are_no_tensor_are_refused(inline: bytes) -> None:
    with pytest.raises(ValueError, match="tensor"):
        rebuild((), inline, ())
