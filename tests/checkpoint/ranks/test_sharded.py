"""Fully sharded training that is saved goes on in another world."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from dure.checkpoint import Checkpointer, load, save
from dure.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from dure.fsdp import fully_shard
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted


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


def _with_save(folder):
    def put(model, optimizer):
        save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def back(model, optimizer):
        load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    return put, back


def _with_checkpointer(folder, **options):
    def put(model, optimizer):
        Checkpointer(folder, **options).save(2, model=model, optimizer=optimizer)

    def back(model, optimizer):
        assert Checkpointer(folder).load(model=model, optimizer=optimizer) == 2

    return put, back


def _with_state_dicts(folder, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def put(model, optimizer):
        state, optim = get_state_dict(model, optimizer, options=options)
        save({"model": state, "optim": optim}, checkpoint_id=folder)

    def back(model, optimizer):
        state, optim = get_state_dict(model, optimizer, options=options)
        averages = [v for k, v in optim.items() if k.endswith("exp_avg")]
        assert load({"model": state, "optim": optim}, checkpoint_id=folder)[:2] == ([], [])
        found = {"model_state_dict": state, "optim_state_dict": optim}
        set_state_dict(model, optimizer, **found, options=options)
        held = [s["exp_avg"] for s in optimizer.state.values()]
        assert all(any(a is h for h in held) for a in averages)  # no copies

    return put, back


WAYS = {
    "save": _with_save,
    "Checkpointer": partial(_with_checkpointer, sharded=False),
    "Checkpointer, sharded": partial(_with_checkpointer, sharded=True),
    "state dicts": partial(_with_state_dicts, flat=False),
    "flat state dicts": partial(_with_state_dicts, flat=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", ["shared", "gathered"])
def test_fully_sharded_training_goes_on_in_another_world(tmp_path, monkeypatch, strategy, way):
    monkeypatch.setenv("DURE_FSDP_STRATEGY", strategy)
    put, back = WAYS[way](tmp_path)

    def saving(rank):
        model, optimizer = _fully_sharded(0.01)
        _losses(model, optimizer, 1)
        put(model, optimizer)
        return _losses(model, optimizer, 2)

    def loading(rank, steps_before):
        model, optimizer = _fully_sharded(0.5)
        _losses(model, optimizer, steps_before)
        back(model, optimizer)
        return _losses(model, optimizer, 2)

    (undisturbed, *_) = run_ranks(3, saving)
    for ranks, steps_before in ((1, 0), (2, 1), (2, 0)):  # of the optimizer that loads
        for losses in run_ranks(ranks, loading, steps_before):
            assert losses == pytest.approx(undisturbed, rel=1e-5)
