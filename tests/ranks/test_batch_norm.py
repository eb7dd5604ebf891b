"""`SyncBatchNorm` on thread-ranks against `BatchNorm` on the whole batch in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError, ShapeError
from dure.parallel.batch_norm.statistics import local_moments, merged
from dure.testing import CommRecorder, run_ranks

SHAPES = {1: (5,), 2: (5, 3, 2), 3: (5, 2, 3, 2)}
LAYERS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def batches(
    sizes: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Return one batch for each rank, of different means and spreads."""
    generator = torch.Generator().manual_seed(len(sizes) + len(shape))
    return [
        (torch.randn(n, *shape, generator=generator, dtype=torch.float64) * (r + 1) + 3 * r).to(
            dtype
        )
        for r, n in enumerate(sizes)
    ]


def train(layer: nn.Module, steps: list[torch.Tensor]) -> list[torch.Tensor]:
    """Make a step on each input; return outputs, gradients of inputs and the layer's state."""
    seen: list[torch.Tensor] = []
    for step in steps:
        x = step.clone(memory_format=torch.preserve_format).requires_grad_()
        y = layer(x)
        assert y.dtype == x.dtype
        weights = torch.arange(y[:1].numel(), dtype=y.dtype).view(y[:1].shape).cos()
        (y.sin() * weights).sum().backward()
        assert x.grad is not None
        seen += [y.detach(), x.grad]
    return seen


def compare(layer: nn.Module, per_rank: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    """Train `layer` on two steps of the whole batch, and converted on ranks; compare all of it."""
    whole = torch.cat(per_rank)
    whole = whole.contiguous(memory_format=_format_of(per_rank[0]))
    alone = copy.deepcopy(layer)
    expected = [t.split([len(b) for b in per_rank]) for t in train(alone, [whole, whole * 2])]

    def rank_main(rank: int) -> tuple[list[torch.Tensor], nn.Module]:
        mine = dist.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer))
        assert isinstance(mine, dist.SyncBatchNorm)
        return train(mine, [per_rank[rank], per_rank[rank] * 2]), mine

    results = run_ranks(len(per_rank), rank_main)
    for rank, (seen, mine) in enumerate(results):
        for ours, theirs in zip(seen, expected, strict=True):
            torch.testing.assert_close(ours, theirs[rank], atol=tolerance, rtol=tolerance)
            assert ours.is_contiguous(memory_format=_format_of(per_rank[rank]))
        assert list(mine.state_dict()) == list(alone.state_dict())
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(
                mine.state_dict()[name], value, atol=tolerance, rtol=tolerance
            )
    for name, parameter in alone.named_parameters():
        ours = torch.stack([_grad(m.get_parameter(name)) for _, m in results]).sum(0)
        torch.testing.assert_close(ours, _grad(parameter), atol=10 * tolerance, rtol=tolerance)


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _format_of(tensor: torch.Tensor) -> torch.memory_format:
    channels_last = tensor.dim() == 4 and tensor.stride(1) == 1
    return torch.channels_last if channels_last else torch.contiguous_format


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 4, 2), (3, 0, 1, 2)])
def test_ranks_are_one_batch(dims: int, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    layer = LAYERS[dims](5, dtype=torch.float64)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    compare(layer, batches(sizes, SHAPES[dims]))


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.5}],
    ids=str,
)
def test_options_mean_what_they_mean_in_one_process_3_ranks(options: dict[str, Any]) -> None:
    compare(nn.BatchNorm2d(5, **options).double(), batches((2, 0, 3), SHAPES[2]))


def test_channels_last_is_kept_2_ranks() -> None:
    inputs = [b.contiguous(memory_format=torch.channels_last) for b in batches((2, 3), SHAPES[2])]
    compare(nn.BatchNorm2d(5).double(), inputs)


def test_bfloat16_inputs_have_float32_statistics_2_ranks() -> None:
    # A bfloat16 has 8 bits: outputs are a rounding apart; statistics, of float32, are not.
    layer = nn.BatchNorm1d(5)
    inputs = batches((40, 24), SHAPES[1], torch.bfloat16)
    alone = copy.deepcopy(layer)
    expected = alone(torch.cat(inputs).float())

    def rank_main(rank: int) -> tuple[torch.Tensor, nn.Module]:
        mine = dist.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer))
        x = inputs[rank].clone().requires_grad_()
        y = mine(x)
        y.float().pow(3).sum().backward()
        assert y.dtype == _grad(x).dtype == torch.bfloat16  # pyright: ignore[reportArgumentType]
        return y.detach(), mine

    results = run_ranks(2, rank_main)
    torch.testing.assert_close(
        torch.cat([y for y, _ in results]).float(), expected.detach(), atol=0.01, rtol=0.01
    )
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(
            results[0][1].get_buffer(name), alone.get_buffer(name), atol=1e-6, rtol=1e-6
        )


def test_evaluation_communicates_nothing_and_uses_running_statistics_2_ranks() -> None:
    layer = nn.BatchNorm1d(5)
    layer(torch.randn(8, 5))
    x = torch.randn(4, 5)
    expected = copy.deepcopy(layer).eval()(x)

    def rank_main(rank: int) -> torch.Tensor:
        mine = dist.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer)).eval()
        with CommRecorder() as seen:
            result = mine(x)
        assert seen.ops == []
        return result.detach()

    for result in run_ranks(2, rank_main):
        assert torch.equal(result, expected)


def test_one_collective_forward_and_one_backward_3_ranks() -> None:
    def rank_main(rank: int) -> list[list[str]]:
        layer = dist.SyncBatchNorm(5)
        seen: list[list[str]] = []
        for needs_gradient in (True, False):
            x = torch.randn(2, 5, requires_grad=needs_gradient)
            with CommRecorder() as forward:
                y = layer(x)
            with CommRecorder(rank=rank) as backward:
                y.sum().backward()
            seen += [forward.ops, backward.ops]
        with torch.no_grad(), CommRecorder() as forward:
            layer(torch.randn(2, 5))
        return [*seen, forward.ops]

    gather, reduce = ["all_gather_single"], ["all_reduce"]
    assert run_ranks(3, rank_main) == [[gather, reduce, gather, [], gather]] * 3


def test_gradcheck_2_ranks() -> None:
    # Both ranks perturb the same element of the same input: what the numeric derivative adds up
    # over inputs, the analytic one adds up over outputs, and by symmetry the two are equal.
    values = torch.randn(2, 3, 2, dtype=torch.float64)

    def rank_main(rank: int) -> bool:
        layer = dist.SyncBatchNorm(3, track_running_stats=False, dtype=torch.float64)
        x = values.clone().requires_grad_()

        def normalized(x: torch.Tensor) -> torch.Tensor:
            return layer(x)

        return torch.autograd.gradcheck(normalized, (x,))

    assert run_ranks(2, rank_main) == [True, True]


def test_inside_ddp_ranks_train_as_one_process_does_4_ranks() -> None:
    torch.manual_seed(0)

    # Two branches: several layers are in flight at once.
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4))
            self.right = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4))
            self.out = nn.Sequential(nn.Flatten(), nn.Linear(4 * 9, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.relu(self.left(x)) + self.right(x))

    net = Net().double()
    data = torch.randn(3, 8, 2, 3, 3, dtype=torch.float64)

    def steps(model: nn.Module, parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for x in parts:
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        return {k.removeprefix("module."): v.detach() for k, v in model.state_dict().items()}

    expected = steps(copy.deepcopy(net), list(data))

    def rank_main(rank: int) -> dict[str, torch.Tensor]:
        mine = dist.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(net))
        ddp = dist.DistributedDataParallel(mine, bucket_cap_mb=1e-4)
        return steps(ddp, [x[rank::4] for x in data])

    for state in run_ranks(4, rank_main):
        assert list(state) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, atol=1e-12, rtol=1e-12)


def test_only_the_ranks_of_its_group_are_one_batch_4_ranks() -> None:
    inputs = batches((2, 2, 2, 2), (5,))

    def rank_main(rank: int) -> torch.Tensor:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        layer = dist.SyncBatchNorm(5, process_group=groups[rank % 2], dtype=torch.float64)
        return layer(inputs[rank]).detach()

    for rank, result in enumerate(run_ranks(4, rank_main)):
        pair = [rank % 2, rank % 2 + 2]
        whole = nn.BatchNorm1d(5).double()(torch.cat([inputs[r] for r in pair])).detach()
        torch.testing.assert_close(result, whole.split(2)[rank // 2], atol=1e-12, rtol=1e-12)


def test_wrong_inputs_are_refused_on_all_ranks_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        layer = dist.SyncBatchNorm(5)
        for x in (torch.randn(5), torch.randn(2, 4), torch.randn(1 - rank, 5)):
            with pytest.raises(ShapeError):
                layer(x)
        assert layer(torch.randn(0, 5)).shape == (0, 5)  # nobody has anything: nothing happens
        assert torch.equal(layer.running_mean, torch.zeros(5))

    run_ranks(2, rank_main)


def test_moments_survive_a_mean_that_is_large_against_the_spread() -> None:
    values = torch.randn(64, 1, generator=torch.Generator().manual_seed(0)) + 10000.0
    rows = [local_moments(part) for part in values.split([1, 30, 0, 33])]
    table = torch.stack(
        [torch.cat([m.mean, m.squares, torch.tensor([float(m.count)])]) for m in rows]
    )
    moments = merged(table)
    exact = values.double()
    # A difference of squares has 1e8 in float32, whose spacing is 8: nothing would be left.
    assert moments.squares.item() / 64 == pytest.approx(exact.var(correction=0).item(), rel=1e-4)
    assert moments.mean.item() == pytest.approx(exact.mean().item(), rel=1e-7)


def test_conversion_keeps_tensors_sharing_and_mode() -> None:
    shared = nn.BatchNorm1d(4)
    net = nn.Sequential(nn.Linear(4, 4), shared, nn.Sequential(shared, nn.BatchNorm1d(4).eval()))
    before = {k: id(v) for k, v in [*net.named_parameters(), *net.named_buffers()]}
    result = dist.SyncBatchNorm.convert_sync_batchnorm(net)
    assert result is net
    after = {k: id(v) for k, v in [*net.named_parameters(), *net.named_buffers()]}
    assert after == before
    inner = net[2]
    assert isinstance(inner, nn.Sequential)
    assert net[1] is inner[0]
    assert isinstance(net[1], dist.SyncBatchNorm)
    assert (net[1].training, inner[1].training) == (True, False)
    with pytest.raises(ModuleError):
        dist.SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())
