"""What an operator writes stays where it is, unless only torch's own formulas have it."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dure.errors import PlacementError
from dure.tensor import DTensor, Partial, Shard, init_device_mesh
from dure.testing import run_ranks
from ranks.rule_checks import check, made

X = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)


def test_terms_are_not_copied_to_what_rounds_them():
    # 0.5 + 0.5 is 1; the terms as integers are 0 and 0.
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        halves = DTensor.from_local(torch.full((3,), 0.5), mesh, [Partial()])
        whole = DTensor.from_local(torch.zeros(3, dtype=torch.int64), mesh)
        terms = DTensor.from_local(torch.zeros(3, dtype=torch.int64), mesh, [Partial()])
        assert whole.copy_(halves).full_tensor().tolist() == [1, 1, 1]
        with pytest.raises(PlacementError):
            terms.copy_(halves)
        floats = DTensor.from_local(torch.zeros(3), mesh, [Partial()])
        assert floats.copy_(halves).placements == (Partial(),)
        assert floats.full_tensor().tolist() == [1, 1, 1]

    run_ranks(2, body)


def test_composite_operators_write_their_temporaries():
    # The mean over a sharded dimension is terms of a sum; eps is added to it in place.
    check(lambda x: F.rms_norm(x, (6,)), X, terms=["sum"])

    def infer(x):
        with torch.inference_mode():
            return F.rms_norm(x, (6,))

    check(infer, X.detach(), terms=["sum"])


def test_a_gradient_that_is_written_is_moved():
    # The second gradient is whole where the first one is terms of a sum.
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = made(mesh, torch.ones(2, requires_grad=True), [Shard(0)])
        whole = x.redistribute(placements=[Shard(0)])
        (whole.sum() * 3).backward()
        (whole.sum() * 4).backward()
        assert x.grad.full_tensor().tolist() == [7, 7]

    run_ranks(2, body)


@pytest.mark.parametrize("how", ["name", "result", "view"])
def test_what_a_program_has_is_not_moved(how):
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = made(mesh, torch.ones(4), [Partial()])
        write = {
            "name": lambda: x.add_(1),
            "result": lambda: (x + x).add_(1),
            "view": lambda: x.view(2, 2).add_(1),
        }
        with pytest.raises(PlacementError):
            write[how]()
        assert x.placements == (Partial(),)
        assert x.full_tensor().tolist() == [1, 1, 1, 1]

    run_ranks(2, body)


def test_writing_by_index_to_what_shares_memory_is_refused_on_all_ranks():
    # torch would refuse on the ranks whose parts overlap, and the others would go on.
    def body(rank):
        mesh = init_device_mesh("cpu", (3,))
        tall = DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(1)]).expand(2, 4, 6)
        mask = DTensor.from_local(torch.ones(2, 4, 6, dtype=torch.bool), mesh)
        with pytest.raises(PlacementError, match="writes its operand"):
            tall[mask] = 1.0

    run_ranks(3, body)
