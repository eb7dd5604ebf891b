"""Replicas of a module: what they share with it, and what they copy."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn

from dure.errors import ModuleError
from dure.parallel.dp import replicate
from tests.parallel.dp.dp_models import parallel


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


def test_replica_on_another_device_has_copies_of_everything() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.rnn = nn.LSTM(4, 4, batch_first=True)
    model.tied = model[0]
    first, second = replicate(model, ["cpu", "meta"])
    assert {t.device.type for t in first.state_dict().values()} == {"cpu"}
    assert {t.device.type for t in second.state_dict().values()} == {"meta"}
    assert second.tied.weight is second[0].weight
    assert second[0].weight.requires_grad and second[0].weight.grad_fn is not None
    assert second.rnn(torch.ones(2, 3, 4, device="meta"))[0].shape == (2, 3, 4)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_modules_that_cannot_be_replicated_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(1, 1))
    with pytest.raises(ModuleError):
        parallel(nn.Sequential(scripted))(torch.ones(2, 1))  # pyright: ignore[reportArgumentType]
