"""Replicas that run at the same time: their threads, random numbers and errors."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import UsageError
from dure.parallel.dp import parallel_apply, replicate
from tests.parallel.dp.dp_models import parallel


def test_number_of_threads_is_torchs_by_default_and_comes_back() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    class Count(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return super().forward(input)

    torch.set_num_threads(4)
    try:
        model = parallel(Count(1, 1), None)
        assert len(model.device_ids) == 4
        model(torch.ones(2, 1))
        assert seen == [2, 2]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


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


@pytest.mark.parametrize("number", [0, 1])
def test_exit_of_a_replica_is_raised(number: int) -> None:
    class Exits(torch.nn.Module):
        def forward(self, x: int) -> int:
            if x == number:
                raise SystemExit(3)
            return x

    with pytest.raises(SystemExit):
        parallel_apply([Exits(), Exits()], [0, 1], devices=["cpu", "cpu"])


def test_modules_are_applied_to_their_own_arguments() -> None:
    model = nn.Linear(2, 2)
    parts = [torch.ones(2, 2), torch.zeros(1, 2)]
    replicas = replicate(model, 2)
    for result, part in zip(parallel_apply(replicas, parts), parts, strict=True):
        assert torch.equal(result, model(part))
    assert not parallel_apply(replicate(model, 2, detach=True), parts)[1].requires_grad
    with pytest.raises(UsageError):
        parallel_apply(replicas, parts[:1])
