"""Fully sharded training that is saved goes on in another world."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from dure.checkpoint import (
    Checkpointer,
    load,
    save,
)
from dure.fsdp import fully_shard
from dure.testing import run_ranks
from ranks.saved_states import counted


def _fully_sharded(scale):
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(counted(*parameter.shape) * scale)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _losses(model, optimizer, steps):
    inputs = torch.arange(10.0).reshape(2, 5) / 10
    losses = []
    for _ in range(steps):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("way", ["save", "Checkpointer", "Checkpointer, sharded"])
@pytest.mark.parametrize("strategy", ["shared", "gathered"])
def test_fully_sharded_training_goes_on_in_another_world(tmp_path, monkeypatch, strategy, way):
    monkeypatch.setenv("DURE_FSDP_STRATEGY", strategy)
    checkpoints = Checkpointer if way == "Checkpointer" else partial(Checkpointer, sharded=True)

    def saving(rank):
        model, optimizer = _fully_sharded(0.01)
        _losses(model, optimizer, 1)
        if way == "save":
            save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
        else:
            checkpoints(tmp_path).save(2, model=model, optimizer=optimizer)
        return _losses(model, optimizer, 2)

    def loading(rank, steps_before):
        model, optimizer = _fully_sharded(0.5)
        _losses(model, optimizer, steps_before)
        if way == "save":
            load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
        else:
            assert checkpoints(tmp_path).load(model=model, optimizer=optimizer) == 2
        return _losses(model, optimizer, 2)

    (undisturbed, *_) = run_ranks(3, saving)
    for ranks, steps_before in (
        (1, 0),
        (2, 1),
    ):  # an optimizer that has not stepped, and one that has
        for losses in run_ranks(ranks, loading, steps_before):
            assert losses == pytest.approx(undisturbed, rel=1e-5)
