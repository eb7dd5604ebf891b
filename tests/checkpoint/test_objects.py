"""Objects of a run: state that comes back as it was, and other objects, which are refused."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from dure.checkpoint import Checkpointer, PerRank, load, save
from dure.errors import CheckpointMismatch, DureError, PeerLost, UsageError
from tests.checkpoint.small_runs import equal, small, trained


@pytest.mark.parametrize(
    "other",
    [
        lambda: {"model": small(width=5)},
        lambda: {"model": small().double()},
        lambda: {"model": nn.Sequential(nn.Linear(3, 4))},
        lambda: {"model": nn.Sequential(OrderedDict(other=nn.Linear(3, 4)))},
        lambda: {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        lambda: {"model": PerRank(small())},
        lambda: {"unknown": small()},
        lambda: {"scheduler": small()},
    ],
)
def test_checkpoint_of_other_objects_is_refused_before_anything_changes(tmp_path, other):
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(1, **trained())
    objects = trained(4) | other()
    first = objects["model"]
    before = {k: v.clone() for k, v in getattr(first, "value", first).state_dict().items()}
    with pytest.raises(CheckpointMismatch, check=lambda e: e.path == str(path)):
        checkpoints.load(**objects)
    assert equal(before, dict(getattr(first, "value", first).state_dict()))


class Packed(torch.optim.SGD):
    """An optimizer whose state has another form than torch's."""

    def state_dict(self):
        momenta = [self.state[p]["momentum_buffer"] for p in self.param_groups[0]["params"]]
        return {"momentum": torch.cat([m.flatten() for m in momenta])}

    def load_state_dict(self, state_dict):
        if "momentum" not in state_dict:
            raise KeyError("momentum")
        parts = state_dict["momentum"].split([p.numel() for p in self.param_groups[0]["params"]])
        for p, part in zip(self.param_groups[0]["params"], parts, strict=True):
            self.state[p]["momentum_buffer"] = part.view_as(p)


def _stepped(kind, scale):
    model = small()
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.5)
    (model(torch.ones(2, 3)).sum() * scale).backward()
    optimizer.step()
    return optimizer


def test_an_optimizer_whose_state_has_no_groups_comes_back(tmp_path):
    saved, other = _stepped(Packed, 1), _stepped(Packed, 3)
    Checkpointer(tmp_path).save(1, optimizer=saved)
    assert not equal(saved.state_dict(), other.state_dict())
    Checkpointer(tmp_path).load(optimizer=other)
    assert equal(saved.state_dict(), other.state_dict())


@dataclass
class Progress:
    step: int = 0
    moment: torch.Tensor = field(default_factory=lambda: torch.zeros(2))


@dataclass
class OtherProgress:
    epoch: int = 0


@dataclass(frozen=True)
class Rates:
    beta: float = 0.0


class Run:
    def __init__(self, progress: Any) -> None:
        self.progress, self.rates = progress, [Rates()]

    def state_dict(self) -> dict[str, Any]:
        return {"progress": self.progress, "rates": (self.rates,)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.progress, (self.rates,) = state["progress"], state["rates"]


def _save_and_load(way: str, folder: Any, saved: Any, found: Any) -> None:
    if way == "Checkpointer":
        Checkpointer(folder).save(1, it=saved)
        Checkpointer(folder).load(it=found)
    else:
        save({"it": saved}, checkpoint_id=folder)
        load({"it": found}, checkpoint_id=folder)


WAYS = pytest.mark.parametrize("way", ["Checkpointer", "load"])


@WAYS
def test_an_object_gets_its_dataclasses_back(tmp_path, way):
    run, found = Run(Progress(7, torch.ones(2))), Run(Progress())
    run.rates = [Rates(0.5)]
    _save_and_load(way, tmp_path, run, found)
    assert type(found.progress) is Progress and found.progress.step == 7
    assert found.progress.moment.tolist() == [1, 1] and found.rates == [Rates(0.5)]


def test_an_object_whose_dataclass_has_other_fields_is_refused(tmp_path):
    with pytest.raises(CheckpointMismatch, match=r"it\.progress has the fields"):
        _save_and_load("Checkpointer", tmp_path, Run(Progress()), Run(OtherProgress()))


class Failing:
    def __init__(self, error: DureError) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (PeerLost("rank 1 is gone", peer=1), PeerLost),
        (UsageError("of another order", seen="seed 1", fix="Use seed 2."), CheckpointMismatch),
    ],
)
def test_only_an_error_about_the_state_becomes_a_mismatch(tmp_path, error, raised):
    """A lost peer is not the checkpoint's matter, though its error is a RuntimeError."""
    with pytest.raises(raised) as caught:
        _save_and_load("Checkpointer", tmp_path, Failing(error), Failing(error))
    assert caught.value.fix == error.fix
