"""fully_shard against torch's: signatures, losses, gradients, weights."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp

import dure.fsdp


def _methods(cls: Any) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def _names(function: Any) -> list[str]:
    return [n for n in inspect.signature(function).parameters if n != "self"]


def test_every_method_of_a_sharded_module_is_there() -> None:
    assert not _methods(torch_fsdp.FSDPModule) - _methods(dure.fsdp.FSDPModule)


@pytest.mark.parametrize(
    "name", sorted(_methods(torch_fsdp.FSDPModule) & _methods(dure.fsdp.FSDPModule))
)
def test_methods_take_what_torchs_take(name: str) -> None:
    ours, theirs = (getattr(m.FSDPModule, name) for m in (dure.fsdp, torch_fsdp))
    assert _names(ours) == _names(theirs)


@pytest.mark.parametrize(
    "name",
    [
        "CPUOffloadPolicy",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "fully_shard",
        "register_fsdp_forward_method",
        "share_comm_ctx",
    ],
)
def test_functions_and_policies_take_what_torchs_take(name: str) -> None:
    ours, theirs = getattr(dure.fsdp, name), getattr(torch_fsdp, name, None)
    if theirs is None:
        pytest.skip(f"needs a newer torch: this one has no {name}")
    assert _names(ours)[: len(_names(theirs))] == _names(theirs)
