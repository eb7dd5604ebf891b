"""Calls and their fingerprints: what ranks see of each other's calls, and what they find."""

from __future__ import annotations

import pytest
import torch

from dure.comm.call import SIZE, Call, Fingerprint, compare, fingerprint
from dure.comm.ops import ReduceOp
from tests.comm import calls

SUM = ReduceOp.SUM


def _compare(*made: Call) -> str:
    return compare([fingerprint(call, r, len(made)) for r, call in enumerate(made)])


def _tensors(*lengths: int) -> list[torch.Tensor]:
    return [torch.zeros(n) for n in lengths]


def test_a_packed_fingerprint_is_the_same_again():
    packed = fingerprint(calls.reduce(torch.zeros(2, 3), 5, ReduceOp.MAX), 0, 6).pack()
    assert len(packed) == SIZE
    found = Fingerprint.unpack(b"xx" + packed, 2)
    assert found.pack() == packed
    assert found.text("a.py:3") == "reduce(float32[6], MAX, root 5) at a.py:3"


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (calls.all_reduce(torch.zeros(4), ReduceOp.MAX), "reduction"),
        (calls.all_reduce(torch.zeros(4, dtype=torch.int32), SUM), "dtype"),
        (calls.all_reduce(torch.zeros(5), SUM), "lengths"),
        (calls.reduce(torch.zeros(4), 0, SUM), "operation"),
        (calls.barrier(), "operation"),
    ],
)
def test_every_difference_is_named(other, what):
    mine = calls.all_reduce(torch.zeros(4), SUM)
    assert _compare(mine, mine, mine) == ""
    assert _compare(mine, other) == f"rank 0 and rank 1 differ in the {what}"
    assert "root" in _compare(
        calls.broadcast(_tensors(1)[0], 0), calls.broadcast(_tensors(1)[0], 1)
    )


def test_shapes_may_differ_where_the_number_of_elements_is_one():
    flat, square = torch.zeros(16), torch.zeros(4, 4)
    assert _compare(calls.all_reduce(flat, SUM), calls.all_reduce(square, SUM)) == ""


def test_lengths_by_rank_are_compared_by_all():
    one, two = _tensors(1, 2)
    fits = [calls.all_gather(_tensors(1, 2), one), calls.all_gather(_tensors(1, 2), two)]
    assert _compare(*fits) == ""
    assert _compare(fits[0], calls.all_gather(_tensors(2, 2), two)) != ""
    assert _compare(calls.gather(_tensors(1, 2), one, 0), calls.gather(None, two, 0)) == ""
    assert _compare(calls.gather(_tensors(1, 3), one, 0), calls.gather(None, two, 0)) != ""
    assert _compare(calls.scatter(one, _tensors(1, 2), 0), calls.scatter(two, None, 0)) == ""
    assert _compare(calls.scatter(one, _tensors(2, 1), 0), calls.scatter(two, None, 0)) != ""


def test_what_is_sent_to_each_rank_is_what_it_takes():
    a = calls.all_to_all(_tensors(1, 3), _tensors(1, 2))
    b = calls.all_to_all(_tensors(2, 4), _tensors(3, 4))
    assert _compare(a, b) == ""
    assert _compare(a, calls.all_to_all(_tensors(2, 4), _tensors(4, 3))) != ""
    assert _compare(a, calls.all_to_all(_tensors(4, 2), _tensors(3, 4))) != ""


def test_both_forms_of_an_operation_may_meet():
    one, two = torch.zeros(1), torch.zeros(2)
    assert _compare(calls.all_to_all_single(two, two), calls.all_to_all_single(two, two)) == ""
    even = calls.all_to_all(_tensors(1, 1), _tensors(1, 1))
    assert _compare(calls.all_to_all_single(two, two), even) == ""
    assert _compare(calls.all_to_all_single(torch.zeros(4), torch.zeros(4)), even) != ""
    gathered = calls.all_gather_single(two, one)
    assert _compare(gathered, calls.all_gather(_tensors(1, 1), one)) == ""
    assert _compare(gathered, calls.all_gather(_tensors(1, 2), one)) != ""
    scattered = calls.reduce_scatter_single(one, two, SUM)
    assert _compare(scattered, calls.reduce_scatter(one, _tensors(1, 1), SUM)) == ""
    assert _compare(scattered, calls.reduce_scatter(one, _tensors(1, 2), SUM)) != ""
