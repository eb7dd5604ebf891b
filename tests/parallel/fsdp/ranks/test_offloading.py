"""`offload` and `onload`: a model and its optimizer give their memory back for a while."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import ModuleError, OptimizerError, UsageError
from dure.fsdp import MixedPrecisionPolicy, offload, onload
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import (
    assert_same,
    by_parts,
    filled,
    full_gradients,
    full_weights,
)

WIDTH = 300  # a weight has more bytes than tensors that stay


def made(way: str, **options: Any) -> nn.Sequential:
    model = filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)))
    return by_parts(way, model, model[0], **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    rows = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) / WIDTH
    model(torch.tanh(rows)).square().sum().backward()
    optimizer.step()


def move_away_and_back(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    gradients = {n: None if g is None else g.clone() for n, g in full_gradients(model).items()}
    part = model[0].weight.to_local()
    given = offload(model, optimizer, folder=folder)
    # The weights of both layers, their gradients and two states; no small tensors.
    assert given > 6 * part.nbytes
    assert not part[part.shape[0] // 2].any()  # its pages were given back
    refused: tuple[tuple[type[Exception], Callable[[], object]], ...] = (
        (ModuleError, lambda: model(torch.ones(1, WIDTH))),
        (ModuleError, model.state_dict),
        (ModuleError, lambda: model.load_state_dict({}, strict=False)),
        (OptimizerError, optimizer.step),
        (UsageError, lambda: offload(model, optimizer)),
    )
    for error, call in refused:
        with pytest.raises(error):
            call()
    onload(model)
    with pytest.raises(UsageError):
        onload(model)
    assert_same(full_gradients(model), gradients)


@pytest.mark.parametrize("low", [False, True])
def test_training_continues_after_an_offload(way: str, low: bool, tmp_path: Path) -> None:
    """As if there had been none: weights, gradients, optimizer state."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: dict[str, Any] = {"mp_policy": policy} if low else {}

    def body(rank: int, moved: bool) -> Any:
        model = made(way, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            train(model, optimizer)
            if moved and step < 2:
                move_away_and_back(model, optimizer, str(tmp_path))
        return full_weights(model)

    plain, moved = (run_ranks(2, body, moved)[0] for moved in (False, True))
    assert all(torch.equal(moved[name], value) for name, value in plain.items())
    assert list(tmp_path.iterdir()) == []
