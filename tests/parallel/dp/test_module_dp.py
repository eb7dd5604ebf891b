"""DataParallel on threads: against one process on the whole batch, and as torch's behaves."""

from __future__ import annotations

import copy
import threading
import traceback
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError, ShapeError, UsageError
from dure.parallel.dp import gather, scatter
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


# --------------------------------------------------------------------------------------------------
# Replicas in threads: the modes they run in, and their errors.


def test_grad_mode_autocast_and_inference_mode_reach_all_threads() -> None:
    seen: list[Any] = []

    class Modes(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            y = super().forward(input)
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), y.dtype))
            return y

    model = parallel(Modes(2, 2), 3)
    for mode in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode()):
        with mode:
            model(torch.ones(3, 2))
    f32, bf16 = torch.float32, torch.bfloat16
    assert seen == [(False, False, f32)] * 3 + [(True, False, bf16)] * 3 + [(False, True, f32)] * 3


def test_error_of_a_replica_names_it_and_shows_its_frames() -> None:
    class Picky(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if input.min() > 3:
                raise KeyError("too large")
            return super().forward(input)

    with pytest.raises(KeyError) as caught:
        parallel(Picky(1, 1), 3)(torch.arange(6.0).reshape(6, 1))
    assert any("replica 2 of 3" in note for note in caught.value.__notes__)
    frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "forward"


# --------------------------------------------------------------------------------------------------
# Devices that a batch can be split over.


@pytest.mark.parametrize("device_ids", [[], 0, ["cuda:0"], ["meta", "meta"]])
def test_devices_that_do_not_fit_are_refused(device_ids: Any) -> None:
    with pytest.raises(ModuleError):
        parallel(nn.Linear(1, 1), device_ids)


# ---------------------------------------------------------------- random numbers of replicas


class Random(nn.Module):
    """Draws in all the ways that follow the thread."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.drop2 = nn.Dropout(0.5), nn.Dropout2d(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape) + torch.randn_like(x) + torch.empty_like(x).uniform_()
        return torch.stack([self.drop(x), self.drop2(x), noise + torch.rand_like(x)], dim=1)


def test_random_numbers_depend_on_the_seed_and_not_on_the_threads_timing() -> None:
    model = parallel(Random(), 4)
    x = torch.ones(8, 16, 3, 3)
    torch.manual_seed(5)
    first = model(x)
    for _ in range(3):
        torch.manual_seed(5)
        assert torch.equal(model(x), first)
    assert not torch.equal(model(x), first)
    parts = first.chunk(4)
    assert not any(torch.equal(parts[0], p) for p in parts[1:])
    dropped, channels = first[:, 0], first[:, 1]
    assert set(dropped.unique().tolist()) == set(channels.unique().tolist()) == {0.0, 2.0}
    assert 0.4 < float((dropped == 0).float().mean()) < 0.6
    assert torch.equal(channels.amin((2, 3)), channels.amax((2, 3)))  # whole channels
    model.eval()
    assert torch.equal(model(x)[:, 0], x)


# --------------------------------------------------------------------------------------------------
# Replicas: what they share with the module, and what they keep.


def test_replicas_share_parameters_and_run_in_their_own_threads() -> None:
    seen: list[tuple[int, int, str]] = []

    class Where(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append((len(input), self.weight.data_ptr(), threading.current_thread().name))
            self.mark = 1  # an attribute of the replica, which goes with it
            return super().forward(input)

    model = Where(2, 2)
    parallel(model, ["cpu"] * 3)(torch.ones(7, 2))
    assert sorted(rows for rows, _, _ in seen) == [1, 3, 3]
    assert {pointer for _, pointer, _ in seen} == {model.weight.data_ptr()}
    assert len({name for _, _, name in seen}) == 3
    assert not hasattr(model, "mark")
    assert not [t for t in threading.enumerate() if t.name.startswith("dure-replica")]


# --------------------------------------------------------------------------------------------------
# Arguments cut into parts, and results joined.


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Record:
    value: torch.Tensor
    name: None = None


class Structured(nn.Module):
    def forward(self, x: torch.Tensor, more: dict[str, Any]) -> Any:
        return OrderedDict(
            pair=Pair(x, x + 1), items=[x, (more["y"], None)], record=Record(x * 2), n=more["k"]
        )


def test_nested_arguments_and_results_are_cut_and_joined() -> None:
    x, y, k = torch.arange(6.0).reshape(3, 2), torch.arange(3), torch.tensor([7, 8])
    result = parallel(Structured())(x, more={"y": y, "k": k, "text": "whole"})
    assert isinstance(result, OrderedDict)
    assert isinstance(result["pair"], Pair)
    assert torch.equal(result["pair"].right, x + 1)
    assert torch.equal(result["items"][1][0], y)
    assert result["items"][1][1] is None
    assert torch.equal(result["record"].value, x * 2)
    assert torch.equal(result["n"], k)


def test_arguments_of_different_batch_sizes_are_refused() -> None:
    with pytest.raises(ShapeError):
        scatter((torch.ones(4, 2), {"y": torch.ones(1), "k": torch.ones(4)}), 2)
    with pytest.raises(ShapeError):
        scatter(torch.ones(4, 2), 2, dim=2)


@pytest.mark.parametrize(
    "outputs",
    [
        [{"a": torch.ones(1)}, {"b": torch.ones(1)}],
        [[torch.ones(1)], [torch.ones(1)] * 2],
        [torch.ones(1), None],
        [3, 3],
    ],
)
def test_results_that_do_not_fit_are_refused(outputs: list[Any]) -> None:
    with pytest.raises(UsageError):
        gather(outputs, "cpu")
