"""A program for torch.distributed that runs on Dure with its imports changed, in ranks of tests."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.comm.forked_ranks import Slot

PROGRAM = Path(__file__).parent / "programs" / "llama_for_torch.py"


def run_program(rank: int, folder: str, *words: str) -> None:
    """Run it, and compare this rank's losses on each mesh with those of one process."""
    text = PROGRAM.read_text()
    changed = text.replace("import torch.distributed as dist", "import dure as dist")
    changed = changed.replace("from torch.distributed.", "from dure.")
    pairs = zip(text.splitlines(), changed.splitlines(), strict=True)
    assert all(" import " in f" {old}" for old, new in pairs if old != new)
    program = Path(folder, f"program{rank}.py")
    program.write_text(changed)
    sys.argv = [str(program), folder, *words]
    runpy.run_path(str(program), run_name="__main__")
    losses = json.loads(Path(folder, f"{rank}.json").read_text())
    for tensor_parallel_ranks in ("2", "4"):
        assert losses[tensor_parallel_ranks] == pytest.approx(losses["0"], rel=1e-5)


def on_one_host(slot: Slot, port: int, folder: str) -> None:
    """Run it with the environment that a launcher sets; attention computes on DTensors."""
    os.environ.update(
        RANK=str(slot.rank),
        LOCAL_RANK=str(slot.rank),
        WORLD_SIZE=str(slot.size),
        LOCAL_WORLD_SIZE=str(slot.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    run_program(slot.rank, folder, "dtensors")


def over_hosts(rank: int, folder: str) -> None:
    """Run it on two hosts; attention computes on each rank's own heads."""
    run_program(rank, folder)
