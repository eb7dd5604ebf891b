"""DataParallel on threads: against one process on the whole batch, and as torch's behaves."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.testing import run_ranks
from tests.parallel.dp.dp_models import parallel


class Net(nn.Module):
    """Layers of which some hold their parameters twice, or share them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, padding=1)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.tied = self.conv
        self.out = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        assert next(self.parameters()).dtype == x.dtype  # torch's replicas have no parameters
        y = self.conv(x) + self.tied(x)
        return self.out(self.rnn(y.transpose(1, 2))[0]) * scale


@pytest.mark.parametrize(("threads", "batch"), [(1, 5), (2, 1), (2, 5), (3, 2), (3, 8), (8, 8)])
def test_outputs_and_gradients_are_those_of_the_whole_batch(threads: int, batch: int) -> None:
    torch.manual_seed(0)
    whole = Net().double()
    split = copy.deepcopy(whole)
    x = torch.randn(batch, 2, 6, dtype=torch.float64)
    expected = whole(x, scale=0.5)
    result = parallel(split, threads)(x, scale=0.5)
    for y in (expected, result):
        y.square().sum().backward()
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    for p, q in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-10)


def test_batch_norm_keeps_the_statistics_of_the_first_part() -> None:
    split, first = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.arange(24.0).reshape(8, 3) ** 2  # the parts' statistics differ by far
    result = parallel(split)(x)
    # To a rounding: the vectors that a sum is made of depend on where its input is in memory.
    torch.testing.assert_close(result[:4], first(x[:4]))
    torch.testing.assert_close(split.running_mean, first.running_mean)
    assert split.num_batches_tracked == 1


def test_module_without_arguments_runs_once() -> None:
    class Constant(nn.Linear):
        def forward(self) -> torch.Tensor:
            return self.weight.sum()

    assert parallel(Constant(2, 2))().dim() == 0


def test_state_dict_has_torchs_names_and_copies_work() -> None:
    model = parallel(nn.Linear(2, 2))
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(torch.ones(3, 2)), model(torch.ones(3, 2)))


def test_advice_to_use_ddp_points_to_the_callers_line() -> None:
    with pytest.warns(FutureWarning, match="DistributedDataParallel") as caught:
        dist.DataParallel(nn.Linear(1, 1), 2)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("device_ids", [[], 0, ["cuda:0"], ["meta", "meta"]])
def test_devices_that_do_not_fit_are_refused(device_ids: Any) -> None:
    with pytest.raises(ModuleError):
        parallel(nn.Linear(1, 1), device_ids)


def test_inside_ddp_gradients_are_averaged_and_outside_it_is_refused_2_ranks() -> None:
    def rank_main(rank: int) -> float:
        model = nn.Linear(1, 1, bias=False)
        ddp = dist.DistributedDataParallel(dist.DataParallel(model, 2))
        ddp(torch.full((4, 1), float(rank + 1))).sum().backward()
        assert list(ddp.state_dict()) == ["module.module.weight"]
        with pytest.raises(ModuleError):
            dist.DataParallel(ddp, 2)(torch.ones(2, 1))
        return model.weight.grad.item()

    with warnings.catch_warnings():  # here: filters are the process's, and ranks are threads
        warnings.simplefilter("ignore", FutureWarning)
        assert run_ranks(2, rank_main) == [6.0, 6.0]


def test_replicas_know_their_ranks_world_3_ranks() -> None:
    class Rank(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + dist.get_rank()

    def rank_main(rank: int) -> list[float]:
        return dist.data_parallel(Rank(), torch.zeros(2), 2).tolist()

    assert run_ranks(3, rank_main) == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
