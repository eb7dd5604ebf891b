"""Gradients of parts that are terms of a sum, an average, an extreme or a product."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import pytest
import torch

from dure.errors import PlacementError
from dure.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from dure.testing import CommRecorder, run_ranks
from tests.thread_ranks import on_ranks

WHOLE = [Replicate()]
TERMS = [[1.0, 5.0, 2.0], [3.0, 5.0, -1.0]]
"""What each of two ranks has; the second elements are equal."""
WEIGHTS = torch.tensor([1.0, 2.0, 4.0])
# Gradients of the sum of WEIGHTS * value, for each rank.
EXPECTED = {
    "sum": [[1, 2, 4], [1, 2, 4]],
    "avg": [[0.5, 1, 2], [0.5, 1, 2]],
    "max": [[0, 2, 4], [1, 0, 0]],
    "min": [[1, 2, 0], [0, 0, 4]],
    "product": [[3, 10, -4], [1, 10, 8]],
}


def _terms(values: Any) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


@pytest.mark.parametrize("reduction", EXPECTED)
def test_a_term_gets_what_it_contributes_to_the_value(reduction: str) -> None:
    def body(rank: int) -> list[Any]:
        mesh, found = init_device_mesh("cpu", (2,)), []
        for options in ({}, {"grad_placements": WHOLE}):
            part = _terms(TERMS[rank])
            whole = DTensor.from_local(part, mesh, [Partial(reduction)], **options)
            (whole.full_tensor(grad_placements=WHOLE) * WEIGHTS).sum().backward()
            found.append(part.grad.tolist())
        part = _terms(TERMS[rank])
        cut = DTensor.from_local(part, mesh, [Partial(reduction)]).redistribute(
            placements=[Shard(0)]
        )
        weights = WEIGHTS[:2] if rank == 0 else WEIGHTS[2:]
        (cut.to_local() * weights).sum().backward()
        return [*found, part.grad.tolist()]

    assert run_ranks(2, body) == [[expected] * 3 for expected in EXPECTED[reduction]]


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("max", [0, 3, 0, 0]),
        ("min", [3, 0, 0, 0]),
        ("avg", [0.75] * 4),
        ("product", [294, 42, 42, 147]),
    ],
)
def test_terms_along_two_axes_are_those_of_all_their_ranks(reduction: str, expected: Any) -> None:
    def body(rank: int) -> float:
        part = _terms([1.0, 7.0, 7.0, 2.0][rank])
        terms = [Partial(reduction)] * 2
        whole = DTensor.from_local(part, init_device_mesh("cpu", (2, 2)), terms)
        (whole * 3).redistribute(placements=WHOLE * 2).backward()
        return part.grad.item()

    assert run_ranks(4, body) == expected


@pytest.mark.parametrize("reduction", ["max", "min", "product"])
@on_ranks(2)
def test_what_a_term_of_an_extreme_does_not_determine_is_refused(rank: int, reduction: str) -> None:
    mesh, part = init_device_mesh("cpu", (2,)), _terms([1.0, 2.0])
    with pytest.raises(PlacementError):
        DTensor.from_local(part, mesh, [Partial(reduction)], grad_placements=[Partial()])
    whole = DTensor.from_local(part, mesh, [Partial(reduction)])
    taken = whole.to_local(grad_placements=WHOLE)
    assert taken.tolist() == [1, 2]
    with CommRecorder() as seen, pytest.raises(PlacementError) as caught:
        taken.sum().backward()
    assert reduction in str(caught.value)
    assert part.grad is None
    assert seen.ops == []
