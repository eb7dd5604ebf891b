"""Replicas in threads: the modes they run in, and their errors."""

import traceback
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.dp.wrapped import parallel


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
