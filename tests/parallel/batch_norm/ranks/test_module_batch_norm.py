"""`SyncBatchNorm` on thread-ranks against `BatchNorm` on the whole batch in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError, ShapeError
from dure.testing import CommRecorder, run_ranks
from tests.thread_ranks import on_ranks

SHAPES = {1: (5,), 2: (5, 3, 2), 3: (5, 2, 3, 2)}
LAYERS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
convert = dist.SyncBatchNorm.convert_sync_batchnorm


def batches(
    sizes: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Return one batch for each rank, of different means and spreads."""
    generator = torch.Generator().manual_seed(len(sizes) + len(shape))
    return [
        (torch.randn(n, *shape, generator=generator).double() * (r + 1) + 3 * r).to(dtype)
        for r, n in enumerate(sizes)
    ]


def train(layer: nn.Module, steps: list[torch.Tensor]) -> list[torch.Tensor]:
    """Make a step on each input; return outputs, gradients of inputs and the layer's state."""
    seen: list[torch.Tensor] = []
    for step in steps:
        x = step.clone(memory_format=torch.preserve_format).requires_grad_()
        y = layer(x)
        weights = torch.arange(y[:1].numel(), dtype=y.dtype).view(y[:1].shape).cos()
        (y.sin() * weights).sum().backward()
        seen += [y.detach(), x.grad]
    return seen


@pytest.mark.parametrize(
    ("dims", "sizes", "options"),
    [
        (1, (4,), {}),
        (1, (1, 4, 2), {}),
        (2, (2, 2), {}),
        (2, (3, 0, 1, 2), {}),
        (3, (1, 4, 2), {}),
        (2, (2, 0, 3), {"affine": False}),
        (2, (2, 0, 3), {"track_running_stats": False}),
        (2, (2, 0, 3), {"momentum": None}),
        (2, (2, 0, 3), {"eps": 0.5}),
        (2, (2, 3), {"channels_last": True}),
    ],
)
def test_ranks_are_one_batch(dims, sizes, options):
    torch.manual_seed(1)
    options = dict(options)
    last = options.pop("channels_last", False)
    order = torch.channels_last if last else torch.contiguous_format
    layer = LAYERS[dims](5, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    per_rank = [b.contiguous(memory_format=order) for b in batches(sizes, SHAPES[dims])]
    whole = torch.cat(per_rank).contiguous(memory_format=order)
    alone = copy.deepcopy(layer)
    expected = [t.split(sizes) for t in train(alone, [whole, whole * 2])]

    def rank_main(rank: int) -> tuple[list[torch.Tensor], nn.Module]:
        mine = convert(copy.deepcopy(layer))
        assert isinstance(mine, dist.SyncBatchNorm)
        return train(mine, [per_rank[rank], per_rank[rank] * 2]), mine

    results = run_ranks(len(sizes), rank_main)
    for rank, (seen, mine) in enumerate(results):
        theirs = [parts[rank] for parts in expected]
        torch.testing.assert_close(seen, theirs, atol=1e-12, rtol=1e-12)
        assert all(t.is_contiguous(memory_format=order) for t in seen)
        torch.testing.assert_close(mine.state_dict(), alone.state_dict(), atol=1e-12, rtol=1e-12)
    for name, parameter in alone.named_parameters():
        grads = [grad for _, m in results if (grad := m.get_parameter(name).grad) is not None]
        total = torch.stack(grads).sum(0)
        torch.testing.assert_close(total, parameter.grad, atol=1e-11, rtol=1e-12)


def test_evaluation_communicates_nothing_and_uses_running_statistics_2_ranks():
    layer = nn.BatchNorm1d(5)
    layer(torch.randn(8, 5))
    x = torch.randn(4, 5)

    def rank_main(rank: int) -> tuple[list[str], torch.Tensor]:
        mine = convert(copy.deepcopy(layer)).eval()
        with CommRecorder() as seen:
            result = mine(x)
        return seen.ops, result.detach()

    results = run_ranks(2, rank_main)
    expected = layer.eval()(x)
    assert all(ops == [] and torch.equal(result, expected) for ops, result in results)


@pytest.mark.parametrize(
    ("trains", "needs_gradient", "backward"),
    [(True, True, ["all_reduce"]), (True, False, []), (False, False, [])],
)
@on_ranks(3)
def test_one_collective_forward_and_one_backward_3_ranks(rank, trains, needs_gradient, backward):
    layer = dist.SyncBatchNorm(5)
    with CommRecorder(rank=rank) as seen, torch.set_grad_enabled(trains):
        y = layer(torch.randn(2, 5, requires_grad=needs_gradient))
        if trains:
            y.sum().backward()
    assert seen.ops == ["all_gather_single", *backward]


def test_only_the_ranks_of_its_group_are_one_batch_4_ranks():
    inputs = batches((2, 2, 2, 2), (5,))

    def rank_main(rank: int) -> torch.Tensor:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        layer = dist.SyncBatchNorm(5, process_group=groups[rank % 2], dtype=torch.float64)
        return layer(inputs[rank]).detach()

    for rank, result in enumerate(run_ranks(4, rank_main)):
        pair = [rank % 2, rank % 2 + 2]
        whole = nn.BatchNorm1d(5).double()(torch.cat([inputs[r] for r in pair])).detach()
        torch.testing.assert_close(result, whole.split(2)[rank // 2], atol=1e-12, rtol=1e-12)


@on_ranks(2)
def test_wrong_inputs_are_refused_on_all_ranks_2_ranks(rank):
    layer = dist.SyncBatchNorm(5)
    for x in (torch.randn(5), torch.randn(2, 4), torch.randn(1 - rank, 5)):
        with pytest.raises(ShapeError):
            layer(x)
    assert layer(torch.randn(0, 5)).shape == (0, 5)  # no rank has values: nothing happens
    assert layer.running_mean is not None
    assert torch.equal(layer.running_mean, torch.zeros(5))


def test_conversion_keeps_tensors_sharing_and_mode():
    shared = nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(4, 4), shared, nn.Sequential(shared, nn.BatchNorm1d(4).eval()))
    before = {k: id(v) for k, v in net.state_dict(keep_vars=True).items()}
    assert convert(net) is net
    assert {k: id(v) for k, v in net.state_dict(keep_vars=True).items()} == before
    assert net[1] is net[2][0]
    assert isinstance(net[1], dist.SyncBatchNorm)
    assert (net[1].training, net[2][1].training) == (True, False)
    with pytest.raises(ModuleError):
        convert(nn.LazyBatchNorm1d())


def test_no_bias_is_learned_with_a_torch_that_has_no_such_argument(monkeypatch):
    plain = nn.modules.batchnorm._BatchNorm.__init__

    def older(self: Any, num_features: int, eps: float, momentum: float, *rest: Any) -> None:
        plain(self, num_features, eps, momentum, *rest)  # no keywords, as before torch 2.13

    monkeypatch.setattr(nn.modules.batchnorm._BatchNorm, "__init__", older)
    layer = dist.SyncBatchNorm(3, bias=False)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert layer(torch.ones(2, 3)).tolist() == [[0.0] * 3] * 2
    assert convert(dist.SyncBatchNorm(3)).bias.tolist() == [0, 0, 0]
