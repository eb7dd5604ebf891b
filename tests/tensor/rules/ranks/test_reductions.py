"""Rules of reductions against the unsharded operators."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

import math

import pytest
import torch

from dure.tensor import Partial, Replicate, Shard, init_device_mesh
from dure.testing import run_ranks
from tests.tensor.ranks.operators import check, placed
from tests.tensor.ranks.parts import made

torch.manual_seed(0)
X = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
FEW = torch.randn(3, 1, 2, dtype=torch.float64, requires_grad=True)  # empty shards on 4 ranks
INTEGERS = torch.randint(-9, 9, (5, 6))
TRUTH = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])


@pytest.mark.parametrize("x", [X, FEW, torch.tensor(2.5, dtype=torch.float64, requires_grad=True)])
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_sums_and_means(name, x):
    def reduced(x):
        of = getattr(x, name)
        several = of(dim=(0, -1)) if x.ndim > 1 else x.sum()
        return of(), of(dim=0), of(dim=-1, keepdim=True), several

    check(reduced, x, partial=["sum", "avg"])


def test_sums_that_cast():
    check(lambda x: x.sum(), INTEGERS)
    check(lambda x: x.sum(0), INTEGERS.to(torch.int8))
    check(lambda x: x.sum(1, dtype=torch.float64), INTEGERS)
    check(lambda x: x.sum(0), TRUTH)
    check(lambda x: x.sum(0, dtype=torch.float64), X.detach().float(), partial=["sum"])
    check(lambda x: x.nansum(0), torch.tensor([[1.0, math.nan], [math.nan, 3.0], [2.0, 2.0]]))
    check(lambda x: (x.count_nonzero(), x.count_nonzero(0)), INTEGERS)


def test_terms_of_extremes_where_parts_are_empty():
    integers = torch.tensor([[3, -4], [5, 6]])  # two rows on four ranks

    def computed(x):
        return -x.amax(0), -x.amin(0), x.amax(0) + 1, x.amin(0) - 1, -x.max(), x.aminmax()[1] + 1

    check(computed, integers)
    check(computed, integers.double())
    check(lambda x: x.amax() + math.inf, integers.double())


def test_extremes_keep_what_is_not_a_number():
    check(lambda x: (x.amax(0), x.min()), torch.tensor([[1.0, math.nan], [2.0, 0.0], [3.0, 4.0]]))


@pytest.mark.parametrize("order", [2, 1, 0, math.inf])
@pytest.mark.parametrize("x", [X, FEW])
def test_norms(x, order):
    def norms(x):
        of = torch.linalg.vector_norm
        return of(x, order), of(x, order, 0), of(x, order, (0, 1), keepdim=True)

    check(norms, x, partial=["sum"])


def test_the_least_norm_of_an_empty_part_is_not_the_least_of_all():
    check(lambda x: torch.linalg.vector_norm(x, -math.inf), FEW.detach())


def test_read_values_are_those_of_the_whole():
    one = torch.tensor([4.5])
    check(lambda x: x.item(), one, partial=["sum", "avg", "max"])
    check(lambda x: bool(x.sum() > 0), X.detach())

    def compared(x, y):
        return x.equal(y), x.equal(x), x.equal(y + 1), x.allclose(y), x.allclose(y + 1)

    check(compared, INTEGERS.double(), INTEGERS.double(), partial=["sum"])

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = made(mesh, torch.ones(4), [Shard(0)])
        y = torch.ones(4)
        y[3] = 2
        other = made(mesh, y, [Shard(0)])  # the ranks' parts differ only on rank 1
        assert not x.equal(other)
        assert not x.allclose(other)
        assert not x.equal(made(mesh, torch.ones(5), [Shard(0)]))

    run_ranks(2, body)


def test_what_is_not_gathered():
    x, rows, columns = X.detach(), [Shard(0)], [Shard(1)]
    total = Partial("sum")
    assert placed(lambda x: (x.sum(), x.sum(1), x.sum(0)), (x, rows)) == [
        [total], [Shard(0)], [total],
    ]  # fmt: skip
    assert placed(lambda x: (x.mean(), x.mean(0)), (x, columns)) == [[total], [Shard(0)]]
    assert placed(lambda x: (x.amax(0), x.any(), x.all()), (x, rows)) == [
        [Partial("max")], [Partial("max")], [Partial("min")],
    ]  # fmt: skip
    assert placed(lambda x: x.max(1), (x, rows)) == [[Shard(0)], [Shard(0)]]
    assert placed(lambda x: x.norm(), (x, rows)) == [[Replicate()]]
    assert placed(lambda x: x.norm(1), (x, rows)) == [[total]]
