"""PowerSGD between thread-ranks: what it keeps, what it sends, and that nothing is lost."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.parallel.ddp.hooks import powerSGD_hook as powerSGD
from dure.parallel.ddp.hooks.powerSGD_hook import orthogonalize
from dure.testing import CommRecorder, run_ranks


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class FakeBucket:
    """What a hook sees of a bucket, over gradients that a test gives."""

    def __init__(self, tensors: list[torch.Tensor], group: Any) -> None:
        self.flat = torch.cat([t.reshape(-1) for t in tensors])
        self.shapes, self.group = [t.shape for t in tensors], group

    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [p.view(shape) for p, shape in zip(parts, self.shapes, strict=True)]

    def names(self) -> list[str]:
        return [f"p{i}" for i in range(len(self.shapes))]

    def is_last(self) -> bool:
        return True


def reduce_with(hook: Any, state: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    bucket = FakeBucket(list(tensors), world())
    hook(state, bucket).wait()
    return bucket.gradients()


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rank_of", [1, 2, 3])
@pytest.mark.parametrize("batched", [False, True])
def test_matrices_of_low_rank_come_back_as_they_are_2_ranks(rank_of: int, batched: bool) -> None:
    def rank_main(rank: int) -> None:
        state = powerSGD.PowerSGDState(
            None, 3, 0, warm_start=False, batch_tensors_with_same_shape=batched
        )
        # The ranks' matrices share their columns' space, so that their mean is of that rank too.
        left = [numbers(40, rank_of, seed=i) for i in range(3)]
        mine = [a @ numbers(rank_of, 32, seed=10 * i + rank) for i, a in enumerate(left)]
        means = [m.clone() for m in mine]
        for mean in means:
            dist.all_reduce(mean, dist.ReduceOp.AVG)
        found = reduce_with(dist.powerSGD_hook, state, *mine)
        for a, b in zip(found, means, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # float32 through a QR

    run_ranks(2, rank_main)


def test_powersgd_of_full_rank_is_averaging_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        state = powerSGD.PowerSGDState(None, 8, 0, min_compression_rate=0.1)
        for step in range(3):
            mine = numbers(8, 20, seed=2 * step + rank)
            mean = mine.clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            (found,) = reduce_with(dist.powerSGD_hook, state, mine)
            torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-5)

    run_ranks(2, rank_main)


@pytest.mark.parametrize("hook", [dist.powerSGD_hook, dist.batched_powerSGD_hook])
def test_what_is_not_sent_is_kept_and_nothing_is_lost_2_ranks(hook: Any) -> None:
    def rank_main(rank: int) -> list[torch.Tensor]:
        state = powerSGD.PowerSGDState(None, 2, 0)
        sent, given = torch.zeros(24, 24), torch.zeros(24, 24)
        results: list[torch.Tensor] = []
        for step in range(4):
            mine = numbers(24, 24, seed=2 * step + rank)
            given += mine
            results += reduce_with(hook, state, mine.clone())
            sent += results[-1]
            assert torch.linalg.matrix_rank(results[-1], atol=1e-3) == 2
        (error,) = state.error_dict.values()
        torch.testing.assert_close(sent + error.view(24, 24), given, rtol=1e-4, atol=1e-4)
        (q,) = state.q_memory_dict.values()
        assert q.shape == (24, 2)
        return results

    first, second = run_ranks(2, rank_main)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_powersgd_sends_as_much_as_its_formula_says_2_ranks() -> None:
    n, m, r, rest = 30, 20, 2, 7

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(m, n, bias=False), nn.Linear(1, rest, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x).sum() + self.b(x[:, :1]).sum()

    def rank_main(rank: int) -> None:
        ddp = dist.DistributedDataParallel(Net())
        state = powerSGD.PowerSGDState(None, r, 2)
        ddp.register_comm_hook(state, dist.powerSGD_hook)
        bitmap = 4 * 3
        for step in range(4):
            with CommRecorder() as seen:
                ddp(torch.ones(2, m)).backward()
            assert seen.ops == ["all_reduce"] * (2 if step < 2 else 3)
            sent = n * m + rest if step < 2 else r * (n + m) + rest
            assert seen.nbytes() == 4 * sent + bitmap
        before, after = 2 * (n * m + rest), 2 * (r * (n + m) + rest)
        assert state.compression_stats() == (before / after, before, after)

    run_ranks(2, rank_main)


def test_bases_are_orthonormal_whatever_they_are_made_of() -> None:
    dependent = numbers(30, 1, seed=0).expand(30, 4)
    for columns in (numbers(30, 4, seed=1), dependent, torch.zeros(30, 4), torch.zeros(30, 1)):
        for dtype, off in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
            q = orthogonalize(columns[None].to(dtype))[0]
            assert q.dtype is dtype
            gram = q.double().T @ q.double()
            assert (gram - torch.eye(len(gram))).abs().max() < off


def test_a_gradient_that_vanished_once_comes_back_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        state = powerSGD.PowerSGDState(None, 1, 0)
        matrix = torch.outer(torch.arange(1.0, 11), torch.arange(1.0, 11))
        assert not reduce_with(dist.powerSGD_hook, state, torch.zeros(10, 10))[0].any()
        for _ in range(2):
            (found,) = reduce_with(dist.powerSGD_hook, state, matrix.clone())
        torch.testing.assert_close(found, matrix, rtol=1e-4, atol=1e-4)

    run_ranks(2, rank_main)


def test_powersgd_goes_on_from_a_pickled_state_2_ranks() -> None:
    def rank_main(rank: int) -> None:
        def steps(state: Any, start: int) -> list[torch.Tensor]:
            made = [numbers(20, 20, seed=2 * step + rank) for step in range(start, start + 2)]
            return [reduce_with(dist.powerSGD_hook, state, m)[0] for m in made]

        state = powerSGD.PowerSGDState(world(), 2, 1)
        steps(state, 0)
        loaded = pickle.loads(pickle.dumps(state))
        assert loaded.process_group is None
        assert all(map(torch.equal, steps(loaded, 2), steps(state, 2)))
        assert loaded.iter == 4

    run_ranks(2, rank_main)


def test_training_with_wrapped_powersgd_reaches_the_loss_of_averaging_2_ranks() -> None:
    def rank_main(rank: int, hooked: bool) -> float:
        torch.manual_seed(0)
        ddp = dist.DistributedDataParallel(nn.Linear(16, 16))
        if hooked:
            state = powerSGD.PowerSGDState(None, 2, 2)
            ddp.register_comm_hook(state, dist.bf16_compress_wrapper(dist.powerSGD_hook))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
        x = numbers(64, 16, seed=rank)
        target = x @ numbers(16, 16, seed=9)
        loss = torch.zeros(())
        for _ in range(40):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x), target) * 4
            loss.backward()
            optimizer.step()
        return loss.item()

    plain, low = (max(run_ranks(2, rank_main, hooked)) for hooked in (False, True))
    assert low < 2 * plain + 0.1


def test_settings_that_make_no_sense_are_refused() -> None:
    for rank_of, start in ((0, 0), (1, -1)):
        with pytest.raises(dist.UsageError):
            powerSGD.PowerSGDState(None, rank_of, start)


@pytest.mark.parametrize("hook", [powerSGD.powerSGD_hook, powerSGD.batched_powerSGD_hook])
def test_gradient_that_is_not_finite_spoils_its_own_step_only_2_ranks(hook: Any) -> None:
    def rank_main(rank: int) -> list[bool]:
        state = powerSGD.PowerSGDState(None, 1, 0)
        finite: list[bool] = []
        for factor in (1.0, float("inf") if rank else 1.0, 1.0):
            (found,) = reduce_with(hook, state, numbers(8, 8, seed=rank) * factor)
            finite.append(bool(found.isfinite().all()))
        return finite

    assert run_ranks(2, rank_main) == [[True, False, True]] * 2


def test_hook_without_a_state_is_refused() -> None:
    for hook in (dist.powerSGD_hook, dist.batched_powerSGD_hook):
        with pytest.raises(dist.UsageError):
            hook(None, None)  # pyright: ignore[reportArgumentType]
