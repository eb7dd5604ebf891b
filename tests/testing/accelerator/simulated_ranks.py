"""What ranks do in tests of the simulated NCCL: cases, each in a group of its own."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

import dure as dist
from dure.testing import accelerator

BACKEND, OVER_HOSTS = "cpu:shm,sim:simulated_nccl", "cpu:hybrid,sim:simulated_nccl"


def cases_of(module: ModuleType) -> list[str]:
    """Return the names of a module's cases, in the order of the source."""
    return [name.removeprefix("case_") for name in vars(module) if name.startswith("case_")]


def chosen(request: pytest.FixtureRequest, cases: Sequence[str]) -> list[str]:
    """Return those of a module's cases that this run of pytest tests."""
    items = [getattr(item, "callspec", None) for item in request.session.items]
    named = {each.params.get("case") for each in items if each is not None}
    return [case for case in cases if case in named]


def errors_on_two_ranks(module: ModuleType) -> Any:
    """Return a fixture: the errors of each of two ranks, by case, of the module's cases.

    The module's `run` is called on each rank with the names of the cases. The ranks are not copies
    of this process: torch's autograd counts devices once, at its first backward pass, which another
    test may have run in a thread.
    """

    @pytest.fixture(scope="module")
    def errors(request: pytest.FixtureRequest) -> list[dict[str, str]]:
        cases = chosen(request, cases_of(module))
        return dist.spawn(module.run, 2, (cases,), start="spawn")

    return errors


def run(module: ModuleType, names: Sequence[str]) -> dict[str, str]:
    """Run cases of a module, as ``case(rank, size)``; return this rank's errors."""
    errors: dict[str, str] = {}
    for name in names:
        accelerator.install()
        dist.init_process_group(OVER_HOSTS if "another_host" in name else BACKEND)
        try:
            getattr(module, f"case_{name}")(dist.get_rank(), dist.get_world_size())
            errors[name] = ""
        except BaseException:
            errors[name] = traceback.format_exc()
        try:
            dist.destroy_process_group()
        except BaseException:
            errors[name] += traceback.format_exc()
    return errors


def late(values: float, numel: int = 3) -> Any:
    """Return a tensor whose values the current stream has still to write."""
    return torch.empty(numel, device="sim").fill_(values)


def host_values(tensor: Any) -> list[float]:
    """Return the values that a tensor has now, without waiting for any stream."""
    from dure.testing.accelerator.memory import on_host

    return on_host(tensor).tolist()
