"""Rules of softmax, losses, normalisation, embedding and attention: what torch's samples leave out.

Uneven and empty parts with means and ignored targets, running statistics, padding, fewer heads for
keys; and which of them gather nothing.
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dure.errors import PlacementError
from dure.tensor import Partial, Replicate, Shard, init_device_mesh
from dure.tensor.debug import CommDebugMode
from dure.testing import run_ranks
from ranks.rule_checks import check, made, placed

torch.manual_seed(0)
R, ROWS, SUM = Replicate(), Shard(0), Partial("sum")


def random(*shape, grad=True):
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


TARGETS = torch.tensor([1, 0, -100, 3, 3])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25], dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_cross_entropy_divides_by_what_all_ranks_count(reduction):
    def loss(x, target, weight):
        return F.cross_entropy(x, target, weight, reduction=reduction)

    check(loss, random(5, 4), TARGETS, WEIGHT)
    check(lambda x, t: F.cross_entropy(x, t, reduction=reduction), random(5, 4), TARGETS)
    images = torch.randint(0, 4, (3, 2, 5))
    check(lambda x, t: F.cross_entropy(x, t, reduction=reduction), random(3, 4, 2, 5), images)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("rows", [5, 3])
def test_losses_of_uneven_and_empty_parts(reduction, rows):
    def losses(x, y):
        return (
            F.mse_loss(x, y, reduction=reduction),
            F.huber_loss(x, y, reduction=reduction, delta=0.7),
            F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
        )

    check(losses, random(rows, 2), random(rows, 2), terms=["sum"])


def test_losses_are_not_gathered():
    x, y, t = random(5, 4), random(5, 4, grad=False), TARGETS
    assert placed(F.mse_loss, (x, [ROWS]), (y, [ROWS])) == [[SUM]]
    assert placed(F.cross_entropy, (x, [ROWS]), (t, [ROWS])) == [[SUM]]
    assert placed(lambda x: x.softmax(1), (x, [ROWS])) == [[ROWS]]
    assert placed(lambda x: x.softmax(0), (x, [ROWS])) == [[ROWS]]

    def gradient(x, t):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(x, t), x)

    assert placed(gradient, (x, [ROWS]), (t, [ROWS])) == [[ROWS]]


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training):
    def norm(x, weight, bias):
        mesh = getattr(x, "device_mesh", None)
        mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        if mesh is not None:
            mean, var = (made(mesh, t, [R] * mesh.ndim) for t in (mean, var))
        try:
            out = F.batch_norm(x, mean, var, weight, bias, training=training)
        except PlacementError:  # channels are sharded, running statistics are not
            mean, var = (t.redistribute(placements=weight.placements) for t in (mean, var))
            out = F.batch_norm(x, mean, var, weight, bias, training=training)
        return out, mean, var

    check(norm, random(5, 3, 2), random(3), random(3), most=60)


def test_running_statistics_are_written_where_they_are():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = made(mesh, random(4, 2, grad=False), [Shard(1)])
        mean = made(mesh, torch.zeros(2, dtype=torch.float64), [SUM])
        var = made(mesh, torch.ones(2, dtype=torch.float64), [Shard(0)])
        with pytest.raises(PlacementError):
            F.batch_norm(x, mean, var, training=True)

    run_ranks(2, body)


def test_embedding_with_padding():
    indices = torch.tensor([[0, 4, 2], [2, 2, 1]])
    table = random(5, 3)
    check(lambda w, i: F.embedding(i, w, padding_idx=2), table, indices, terms=["sum"])
    check(lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), table, indices)
    look = lambda w, i: F.embedding(i, w)  # noqa: E731
    assert placed(look, (table, [ROWS]), (indices, [R])) == [[SUM]]
    assert placed(look, (table, [Shard(1)]), (indices, [R])) == [[Shard(2)]]
    assert placed(look, (table, [R]), (indices, [Shard(1)])) == [[Shard(1)]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention(heads, causal):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    q, k, v = random(3, 4, 5, 8), random(3, heads, 5, 8), random(3, heads, 5, 8)
    check(attend, q, k, v, most=40)
    cut = [Shard(1)]
    assert placed(attend, (q, cut), (k, cut), (v, cut)) == [cut]
    cut = [Shard(0)]
    assert placed(attend, (q, cut), (k, cut), (v, cut)) == [cut]


def test_attention_with_a_mask():
    def attend(q, k, mask):
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    q, k = random(2, 4, 5, 8), random(2, 4, 3, 8)
    for shape in [(5, 3), (2, 1, 5, 3), (2, 4, 5, 3)]:
        check(attend, q, k, torch.rand(shape) > 0.3, most=20)


def test_layers_are_not_gathered():
    x, w = random(5, 4), random(4)
    assert placed(lambda x, w: F.layer_norm(x, (4,), w, w), (x, [ROWS]), (w, [R])) == [[ROWS]]

    def gradient(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(F.layer_norm(x, (4,), w, w).sum(), (x, w))

    assert placed(gradient, (x, [ROWS]), (w, [R])) == [[ROWS], [SUM]]


def test_what_is_no_row_and_no_class_raises():
    """As on one rank: no rank has it, so none of them would notice by itself."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        table, number = torch.ones(5, 3), torch.tensor([1, 7])
        rows = made(mesh, table, [Shard(0)])
        with pytest.raises(IndexError, match="out of range"):
            F.embedding(made(mesh, number, [Replicate()]), rows)
        classes = made(mesh, table[:2], [Shard(1)])
        with pytest.raises(IndexError, match="Target 7 is out of bounds"):
            F.cross_entropy(classes, made(mesh, number, [Replicate()]))
        ignored = F.cross_entropy(classes, made(mesh, number, [Replicate()]), ignore_index=7)
        assert torch.allclose(ignored.full_tensor(), torch.tensor(3.0).log())

    run_ranks(2, body)


def test_a_loss_of_integers_is_a_float_on_a_rank_without_any():
    check(F.mse_loss, torch.tensor([1, 2, 3, 5, 8]), torch.ones(5), meshes=[(4,)])


@pytest.mark.parametrize("cuts", [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(1), Shard(1))])
def test_a_linear_of_rows_cut_twice_sends_nothing(cuts):
    """Rows are flattened to a strided cut, which goes through products, and unflattened again."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2))
        x = made(mesh, random(4, 8, 3), cuts)
        weight = made(mesh, torch.ones(5, 3, dtype=torch.float64, requires_grad=True), [R, R])
        with CommDebugMode() as mode:
            y = F.gelu(F.linear(x, weight, weight.sum(1)))
            (y * y).sum().backward()
        assert mode.get_total_counts() == 0
        assert y.placements == x.grad.placements == cuts

    run_ranks(4, body)
