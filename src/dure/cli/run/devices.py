"""How many ranks `--nproc auto`, `cpu`, `gpu` and `xpu` are on this host.

How many GPUs a program will see is torch's to say: it depends on its build, its driver and the
variables that hide devices. The launcher does not load torch, so it asks an interpreter of its own,
and only if this host has a device that could be one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dure.errors import UsageError

__all__ = ["count"]

_DEVICES = ("nvidia[0-9]*", "kfd", "dri/renderD*", "accel/*", "habanalabs*", "davinci*")
_TIMEOUT_S = 120
_ASK = {
    "gpu": "torch.cuda.device_count() if torch.cuda.is_available() else 0",
    "xpu": "torch.xpu.device_count() if torch.xpu.is_available() else 0",
    "auto": "torch.accelerator.device_count() if torch.accelerator.is_available() else 0",
}


def count(kind: str) -> int:
    """Return how many ranks `kind` (auto, cpu, gpu or xpu) means.

    Raises:
        UsageError: There is no such device.

    Cost: some seconds where this host has devices, for an interpreter that imports torch.
    """
    cores = len(os.sched_getaffinity(0))
    if kind == "cpu":
        return cores
    found = _ask_torch(_ASK[kind]) if _has_devices() else 0
    if not found and kind != "auto":
        raise UsageError(
            f"this host has no {kind} that torch can use",
            seen=f"--nproc {kind}",
            fix="See `python -m torch.utils.collect_env`, or give a number.",
        )
    return found or cores


def _has_devices() -> bool:
    return any(True for pattern in _DEVICES for _ in Path("/dev").glob(pattern))


def _ask_torch(question: str) -> int:
    code = f"import torch; print('devices:', {question})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return int(done.stdout.rpartition("devices:")[2])
    except (subprocess.SubprocessError, ValueError) as error:
        raise UsageError(
            "torch could not say how many devices there are",
            seen=str(getattr(error, "stderr", "") or error).strip().splitlines()[-1],
            fix="Give a number: --nproc N.",
        ) from None
