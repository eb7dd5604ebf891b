"""One job over two hosts for all subjects: what each of them does there on its ranks.

The ranks are forked into the namespaces of their hosts (`procs.hosts`), so that torch is imported
once for all. They run the subjects one after another; each checks by itself what it promises.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

import dure as dist
from dure.errors import DureError
from tests.comm.conformance import suite
from tests.comm.forked_ranks import Slot
from tests.waiting import PATIENCE_S

TIMEOUT = timedelta(seconds=PATIENCE_S)


SUBJECTS = {
    "collectives": "tests.comm.over_hosts:collectives",
    "fsdp": "tests.parallel.fsdp.procs.fsdp_ranks:over_hosts",
    "tensor parallel": "tests.tensor.parallel.ranks.tensor_models:over_hosts",
    "llm": "tests.parallel.ranks.llm_program:over_hosts",
}
"""For each subject what ranks do: the function `fn(rank, folder)`, named "module:function"."""


def run_all(slot: Slot, variables: dict[str, str]) -> dict[str, str]:
    """Run all subjects; return the traceback of each that ran, or "". The first failure ends it."""
    os.environ |= variables | {"RANK": str(slot.rank)}
    os.environ["LOCAL_RANK"] = str(slot.rank % int(os.environ["LOCAL_WORLD_SIZE"]))
    reports: dict[str, str] = {}
    dist.init_process_group(timeout=TIMEOUT)
    for name, subject in SUBJECTS.items():
        module, _, function = subject.partition(":")
        folder = Path(f"{slot.path}-{name}")
        folder.mkdir(exist_ok=True)
        try:
            assert dist.get_backend() == "hybrid"
            getattr(importlib.import_module(module), function)(slot.rank, str(folder))
        except BaseException:
            reports[name] = traceback.format_exc()
            break
        reports[name] = ""
    with suppress(DureError):
        dist.destroy_process_group()
    return reports


def collectives(rank: int, folder: str) -> None:
    """Move data in every way, small and large; reductions are what the other subjects do."""
    suite.run(rank, "moving")


@dataclass(frozen=True, slots=True)
class Loss:
    """What a rank saw when its peers were lost."""

    error: DureError
    elapsed_s: float
    again: DureError
    left: int | None = None


def lose(slot: Slot, variables: dict[str, str], goes_on: bool) -> Loss:
    """Reduce until it fails; then, if there is a store, go on with the ranks that are left."""
    os.environ |= variables | {"RANK": str(slot.rank)}
    dist.init_process_group(timeout=TIMEOUT)
    t = torch.ones(400_000)
    dist.all_reduce(t)
    Path(f"{slot.path}-ready{slot.rank}").touch()
    error, elapsed_s = _failure(lambda: dist.all_reduce(t.fill_(1.0)))
    again, _ = _failure(dist.barrier)
    left = None
    if goes_on:
        dist.shrink()
        dist.all_reduce(t.fill_(1.0))
        left = int(t[-1].item())
    with suppress(DureError):
        dist.destroy_process_group()
    return Loss(error, elapsed_s, again, left)


def _failure(call) -> tuple[DureError, float]:
    """Call until it fails; return the error, and how long the call took that failed."""
    while True:
        began = time.monotonic()
        try:
            call()
        except DureError as error:
            return error, time.monotonic() - began
