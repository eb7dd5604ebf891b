"""`dure plan --here`: this machine as a `Machine`, from pieces of a step that its ranks time.

The ranks are those of a job of `dure run`, with one thread each, and time every piece at the same
moment, so that their contention is measured too (`here_rank`). The result is kept for a day, below
XDG_STATE_HOME.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import psutil

from dure import env
from dure.cli.machine import oversubscribed
from dure.cli.ranks import run_ranks
from dure.errors import UsageError
from dure.plan import Gpu, Machine
from dure.plan.measured import machine_of

__all__ = ["VERSION", "here"]

_A_DAY_S = 86_400
VERSION = 1
"""Of the file that is kept."""


def here(ranks: int, *, again: bool = False) -> Machine:
    """Return this machine with some ranks, measured at most a day ago.

    Cost:
        Some 20 s where it has to be measured.

    Args:
        ranks: How many there are to be.
        again: Measure, also if earlier figures are kept.

    Raises:
        UsageError: No such number of ranks.
        LaunchError: A rank failed.
    """
    if not 1 <= ranks <= 4 * (os.cpu_count() or 1):
        raise UsageError(
            "this machine does not have that many cores",
            op="plan layouts",
            seen=f"{ranks} ranks, {os.cpu_count()} cores",
            fix="Take --gpus-per-node 2.",
        )
    home = env.text("XDG_STATE_HOME")
    folder = (Path(home) if home else Path.home() / ".local" / "state") / "dure"
    kept = folder / f"machine-{ranks}.json"
    if not again and (known := _read(kept, ranks)) is not None:
        return known
    memory = psutil.virtual_memory().total
    source = f"measured here; {oversubscribed(ranks, 0.0) or 'one thread per rank'}"
    machine = machine_of(_measured(ranks), ranks, memory, source)
    folder.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(msgspec.json.encode(_Kept(VERSION, machine.gpu, machine.measured)))
    return machine


class _Kept(msgspec.Struct):
    """A measured machine, as it is kept."""

    version: int
    gpu: Gpu
    measured: dict[str, float]


def _read(path: Path, ranks: int) -> Machine | None:
    """Return what was measured within a day; None: nothing, damaged, or of another format."""
    try:
        if time.time() - path.stat().st_mtime < _A_DAY_S:
            found = msgspec.json.decode(path.read_bytes(), type=_Kept)
            if found.version == VERSION:
                return Machine(found.gpu, 1, ranks, found.measured)
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        pass
    return None


def _measured(ranks: int) -> dict[str, float]:
    """Return what the ranks measured, means over them: seconds, elements and bytes."""
    found: dict[str, float] = {}
    run_ranks("dure.cli.here_rank", (), ranks, found.update)
    return found
