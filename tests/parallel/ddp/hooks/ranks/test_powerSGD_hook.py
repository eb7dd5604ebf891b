"""PowerSGD: what it sends, what it keeps, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.parallel.ddp.hooks.powerSGD_hook import PowerSGDState
from dure.testing import CommRecorder, run_ranks
from tests.thread_ranks import on_ranks

POWER_HOOKS = [dist.powerSGD_hook, dist.batched_powerSGD_hook]


class FakeBucket:
    """The only bucket of its step, with the gradients that a test passes."""

    def __init__(self, tensors: list[torch.Tensor], group: Any) -> None:
        self.flat = torch.cat([t.reshape(-1) for t in tensors])
        self.shapes, self.group = [t.shape for t in tensors], group

    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return self.flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self.flat = tensor

    def gradients(self) -> list[torch.Tensor]:
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [p.view(shape) for p, shape in zip(parts, self.shapes, strict=True)]

    def names(self) -> list[str]:
        return [f"p{i}" for i in range(len(self.shapes))]

    def is_last(self) -> bool:
        return True


def reduce_with(hook: Any, state: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    bucket = FakeBucket(list(tensors), dist.group.WORLD)
    hook(state, bucket).wait()
    return bucket.gradients()


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rank_of", "batched"), [(1, False), (2, True), (3, False), (3, True)])
@on_ranks(2)
def test_matrices_of_low_rank_come_back_as_they_are_2_ranks(rank, rank_of, batched):
    state = PowerSGDState(None, 3, 0, warm_start=False, batch_tensors_with_same_shape=batched)
    # The ranks' matrices share their columns' space, so that their mean is of that rank too.
    left = [numbers(40, rank_of, seed=i) for i in range(3)]
    mine = [a @ numbers(rank_of, 32, seed=10 * i + rank) for i, a in enumerate(left)]
    means = [m.clone() for m in mine]
    for mean in means:
        dist.all_reduce(mean, dist.ReduceOp.AVG)
    found = reduce_with(dist.powerSGD_hook, state, *mine)
    torch.testing.assert_close(found, means, rtol=1e-4, atol=1e-4)  # float32 through a QR


@pytest.mark.parametrize("hook", POWER_HOOKS)
def test_parts_that_are_not_sent_are_kept_and_nothing_is_lost_2_ranks(hook):
    def rank_main(rank: int) -> list[torch.Tensor]:
        state = PowerSGDState(None, 2, 0)
        sent, given = torch.zeros(24, 24), torch.zeros(24, 24)
        results: list[torch.Tensor] = []
        for step in range(3):
            mine = numbers(24, 24, seed=2 * step + rank)
            given += mine
            results += reduce_with(hook, state, mine.clone())
            sent += results[-1]
            assert torch.linalg.matrix_rank(results[-1], atol=1e-3) == 2
        (error,) = state.error_dict.values()
        torch.testing.assert_close(sent + error.view(24, 24), given, rtol=1e-4, atol=1e-4)
        return results

    first, second = run_ranks(2, rank_main)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_powersgd_sends_as_much_as_its_formula_says_and_averages_the_rest_2_ranks():
    n, m, r, rest = 30, 20, 2, 7

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(m, n, bias=False), nn.Linear(1, rest, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).sum() + self.b(x[:, :1]).sum()

    def rank_main(rank: int) -> None:
        ddp = dist.DistributedDataParallel(Net())
        state = PowerSGDState(None, r, 1)
        ddp.register_comm_hook(state, dist.powerSGD_hook)
        bitmap = 4 * 3
        for step in range(2):
            ddp.zero_grad()
            with CommRecorder() as seen:
                ddp(torch.full((1, m), rank + 1.0)).backward()
            assert seen.ops == ["all_reduce"] * (2 if step < 1 else 3)
            sent = n * m + rest if step < 1 else r * (n + m) + rest
            assert seen.nbytes() == 4 * sent + bitmap
            for gradient in (p.grad for p in ddp.parameters()):
                assert gradient is not None
                torch.testing.assert_close(gradient, torch.full_like(gradient, 1.5))
        before, after = n * m + rest, r * (n + m) + rest
        assert state.compression_stats() == (before / after, before, after)

    run_ranks(2, rank_main)


@on_ranks(2)
def test_a_bucket_with_nothing_to_compress_is_averaged_2_ranks(rank):
    (found,) = reduce_with(
        dist.powerSGD_hook, PowerSGDState(None, 1, 0), torch.full((2,), rank + 1.0)
    )
    assert found.tolist() == [1.5, 1.5]


@pytest.mark.parametrize("hook", POWER_HOOKS)
@on_ranks(2)
def test_gradient_that_is_not_finite_spoils_its_own_step_only_2_ranks(rank, hook):
    state = PowerSGDState(None, 1, 0)
    finite: list[bool] = []
    for factor in (1.0, float("inf") if rank else 1.0, 1.0):
        (found,) = reduce_with(hook, state, numbers(8, 8, seed=rank) * factor)
        finite.append(bool(found.isfinite().all()))
    assert finite == [True, False, True]


def test_impossible_settings_and_hooks_without_a_state_are_refused():
    for rank_of, start in ((0, 0), (1, -1)):
        with pytest.raises(dist.UsageError):
            PowerSGDState(None, rank_of, start)
    for hook in POWER_HOOKS:
        with pytest.raises(dist.UsageError):
            hook(None, None)  # pyright: ignore[reportArgumentType]
