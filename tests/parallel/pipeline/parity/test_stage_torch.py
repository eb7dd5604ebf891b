"""Pipelines against torch's: signatures, and a step's losses, outputs and gradients."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed.pipelining as theirs
import torch.distributed.pipelining.microbatch as their_microbatch
import torch.distributed.pipelining.schedules as their_schedules

import dure.pipelining as ours
import dure.pipelining.microbatch as our_microbatch
import dure.pipelining.schedules as our_schedules


def _names(function: Any) -> list[str]:
    return [n for n in inspect.signature(function).parameters if n != "self"]


def test_every_name_is_there() -> None:
    assert not set(theirs.__all__) - set(ours.__all__)
    assert not set(their_microbatch.__all__) - set(our_microbatch.__all__)
    assert not set(their_schedules.__all__) - set(our_schedules.__all__)


@pytest.mark.parametrize("name", sorted(set(theirs.__all__) - {"SplitPoint", "Pipe"}))
def test_names_take_what_torchs_take(name: str) -> None:
    expected = _names(getattr(theirs, name))
    assert _names(getattr(ours, name))[: len(expected)] == expected


@pytest.mark.parametrize("name", ["step", "eval"])
def test_steps_take_what_torchs_take(name: str) -> None:
    assert _names(getattr(ours.Schedule1F1B, name)) == _names(getattr(theirs.Schedule1F1B, name))
