"""Objects of a run: state that comes back as it was, and other objects, which are refused."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from dure.checkpoint import Checkpointer, PerRank
from dure.errors import (
    CheckpointMismatch,
)
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
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoints.load(**objects)
    assert equal(before, dict(getattr(first, "value", first).state_dict()))
    assert str(path) == caught.value.path


def test_tied_and_negated_tensors_come_back_as_they_were(tmp_path):
    weight, negated = torch.ones(3), torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    Checkpointer(tmp_path).save(1, state={"a": weight, "b": weight, "c": negated})
    found = {}
    Checkpointer(tmp_path).load(state=found)
    assert found["a"] is found["b"]
    assert found["c"].tolist() == [-2.0]


class Versioned(nn.Module):
    _version = 3

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.found = None

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.found = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_a_module_learns_of_which_version_the_saved_one_was(tmp_path):
    Checkpointer(tmp_path).save(1, model=nn.Sequential(Versioned()))
    other = nn.Sequential(Versioned())
    Checkpointer(tmp_path).load(model=other)
    assert other[0].found == 3
