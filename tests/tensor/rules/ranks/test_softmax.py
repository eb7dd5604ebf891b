"""Softmax and losses: uneven and empty parts, means and ignored targets; what gathers nothing."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

import pytest
import torch
import torch.nn.functional as F

from dure.tensor import Partial, Replicate, Shard, init_device_mesh
from dure.tensor.parallel import loss_parallel
from dure.testing import run_ranks
from tests.tensor.ranks.operators import check, placed
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh

torch.manual_seed(0)
ROWS = Shard(0)
TARGETS = torch.tensor([1, 0, -100, 3, 3])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)


def random(*shape, grad=True):
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_divides_by_what_all_ranks_count(reduction):
    def loss(x, target, *weight):
        return F.cross_entropy(x, target, *weight, reduction=reduction)

    check(loss, random(5, 4), TARGETS, WEIGHT)
    check(loss, random(5, 4), TARGETS)
    check(loss, random(3, 4, 2, 5), torch.randint(0, 4, (3, 2, 5)))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("rows", [5, 3])
def test_losses_of_uneven_and_empty_parts(reduction, rows):
    def losses(x, y):
        return (
            F.mse_loss(x, y, reduction=reduction),
            F.huber_loss(x, y, reduction=reduction, delta=0.7),
            F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
        )

    check(losses, random(rows, 2), random(rows, 2), partial=["sum"])


def test_losses_are_not_gathered():
    x, y, t = random(5, 4), random(5, 4, grad=False), TARGETS
    assert placed(F.mse_loss, (x, [ROWS]), (y, [ROWS])) == [[Partial()]]
    assert placed(F.cross_entropy, (x, [ROWS]), (t, [ROWS])) == [[Partial()]]
    assert placed(lambda x: x.softmax(1), (x, [ROWS])) == [[ROWS]]
    assert placed(lambda x: x.softmax(0), (x, [ROWS])) == [[ROWS]]

    def gradient(x, t):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(x, t), x)

    assert placed(gradient, (x, [ROWS]), (t, [ROWS])) == [[ROWS]]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_loss_of_sharded_classes_is_known_to_all_ranks_of_their_axis(reduction):
    """Torch's table; a batch that is sharded as well leaves a part, or a term of the sum."""
    scores, weight = random(4, 5, grad=False), torch.arange(1.0, 6.0).double()
    target = torch.tensor([4, 0, -100, 2])
    expected = F.cross_entropy(scores, target, weight, reduction=reduction)
    of_rows = {"none": ROWS, "sum": Partial(), "mean": Partial()}[reduction]
    cases = [  # the placements of scores, of targets, and of the loss
        ((4,), [Shard(1)], [Replicate()], [Replicate()]),
        ((2, 2), [ROWS, Shard(1)], [ROWS, Replicate()], [of_rows, Replicate()]),
        ((2, 2), [Shard(1), ROWS], [Replicate(), ROWS], [Replicate(), of_rows]),
        ((2, 2), [Shard(1), Shard(1)], [Replicate()] * 2, [Replicate()] * 2),
    ]

    def body(rank):
        for shape, of_scores, of_targets, of_loss in cases:
            mesh = init_device_mesh("cpu", shape)
            x = made(mesh, scores, of_scores)
            with loss_parallel():  # in which the weight may be plain
                loss = F.cross_entropy(
                    x, made(mesh, target, of_targets), weight, reduction=reduction
                )
            assert loss.placements == tuple(of_loss)
            torch.testing.assert_close(loss.full_tensor(), expected)
            if of_loss == [Replicate()] * mesh.ndim:
                torch.testing.assert_close(loss.to_local(), expected)

    run_ranks(4, body)


@on_mesh(2)
def test_a_target_that_is_no_class_raises_on_every_rank(mesh):
    """As on one rank: no rank has the class, so none of them would notice by itself."""

    classes = made(mesh, torch.ones(2, 3), [Shard(1)])
    targets = made(mesh, torch.tensor([1, 7]), [Replicate()])
    with pytest.raises(IndexError):
        F.cross_entropy(classes, targets)
    ignored = F.cross_entropy(classes, targets, ignore_index=7)
    assert torch.allclose(ignored.full_tensor(), torch.tensor(3.0).log())


def test_a_loss_of_integers_is_a_float_on_a_rank_without_any():
    check(F.mse_loss, torch.tensor([1, 2, 3, 5, 8]), torch.ones(5), meshes=[(4,)])
