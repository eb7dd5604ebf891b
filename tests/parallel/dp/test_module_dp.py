"""DataParallel on threads: against one process on the whole batch, and as torch's behaves."""

import copy
import warnings

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.testing import run_ranks
from tests.parallel.dp.wrapped import parallel


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
