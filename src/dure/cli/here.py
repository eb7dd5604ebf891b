"""`dure plan --here`: this machine as a `Machine`, from pieces of a step that its ranks time.

The ranks are those of a job of `dure run`, a thread each, and time every piece at the same moment:
what they take from each other is measured too (`here_rank`). What is measured replaces the fitted
constants of the cost model, so that a step on processors is costed by the same formulas. Kept for
a day, below XDG_STATE_HOME.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import psutil

from dure import env
from dure.cli.bench.group import Contestant, Group
from dure.cli.machine import oversubscribed
from dure.errors import UsageError
from dure.plan import Gpu, Machine
from dure.trace.plain_files import parse_json, read_plain

__all__ = ["VERSION", "here", "machine_of"]

_PROGRAM = ("-m", "dure.cli.here_rank")
_A_DAY_S = 86_400
_MOST_BYTES = 1 << 20
_FORMAT, VERSION = "dure machine", 1
_LARGE, _SMALL = (1024, 1024, 1024), (128, 128, 1024)
TOKENS, WIDTH, HIDDEN, HEADS = 512, 512, 1408, 8  # of the layer that is timed
_VOCABULARY = 8192
_PARAMETERS = 1 << 23
_BYTES = 1 << 24  # of a large message
_FREED = 32 << 20  # bytes: half of the most freed memory that a rank keeps (docs/launch.md)


def here(ranks: int, *, again: bool = False) -> Machine:
    """Return this machine with some ranks, measured at most a day ago.

    Cost: some 20 s where it has to be measured.

    Args:
        ranks: How many there are to be.
        again: Measure, whatever is kept.

    Raises:
        UsageError: No such number of ranks.
        LaunchError: A rank failed.
    """
    if not 1 <= ranks <= 4 * (os.cpu_count() or 1):
        raise UsageError(
            "this machine has not so many cores",
            op="plan layouts",
            seen=f"{ranks} ranks, {os.cpu_count()} cores",
            fix="Take --gpus-per-node 2.",
        )
    home = env.text("XDG_STATE_HOME")
    folder = (Path(home) if home else Path.home() / ".local" / "state") / "dure"
    kept = folder / f"machine-{ranks}.json"
    if not again and (known := _read(kept, ranks)) is not None:
        return known
    machine = machine_of(_measured(ranks), ranks)
    folder.mkdir(parents=True, exist_ok=True)
    found = {"gpu": asdict(machine.gpu), "measured": machine.measured}
    kept.write_text(json.dumps({"format": _FORMAT, "version": VERSION} | found))
    return machine


def _read(path: Path, ranks: int) -> Machine | None:
    """Return what was measured within a day; None: nothing, damaged, or of another format."""
    try:
        if time.time() - path.stat().st_mtime >= _A_DAY_S:
            return None
        found = parse_json(read_plain(path, _MOST_BYTES))
        if (found["format"], found["version"]) != (_FORMAT, VERSION):
            return None
        return Machine(Gpu(**found["gpu"]), 1, ranks, found["measured"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _measured(ranks: int) -> dict[str, float]:
    """Return what the ranks measured, means over them: seconds, elements and bytes."""
    sizes = {"tokens": TOKENS, "width": WIDTH, "hidden": HIDDEN, "heads": HEADS}
    tiny = {"tokens": 2, "width": 64, "hidden": 64, "heads": 1}
    pieces: dict[str, tuple[str, dict[str, int]]] = {
        "tiny": ("layer", tiny),
        "tiny_forward": ("layer", tiny | {"backward": 0}),
        "small_update": ("adam", {"parameters": 8192}),  # so that libraries are loaded
        "held": ("held", {}),  # before anything large was freed
        "large": ("product", dict(zip("mnk", _LARGE, strict=True))),
        "small": ("product", dict(zip("mnk", _SMALL, strict=True))),
        "stream": ("stream", {"elements": 1 << 24}),
        "attention": ("attention", {"tokens": TOKENS, "width": WIDTH, "heads": HEADS}),
        "layer": ("layer", sizes),
        "loss": ("loss", {"tokens": TOKENS, "vocabulary": _VOCABULARY}),
        "adam": ("adam", {"parameters": _PARAMETERS}),
        "kept": ("kept", sizes),
    }
    if ranks > 1:
        for name in ("all_reduce", "message"):
            pieces |= {f"{name}_{n}": (name, {"num_bytes": n}) for n in (8, _BYTES)}
    with Group(Contestant(role=(), program=_PROGRAM), ranks) as group:
        group.accept_ranks()
        return {
            name: fmean(answer["value"] for answer in group.call(command, **arguments))
            for name, (command, arguments) in pieces.items()
        }


def machine_of(seen: dict[str, float], ranks: int) -> Machine:
    """Return the machine of what its ranks measured: peaks, and constants of the cost model.

    Args:
        seen: Seconds of the pieces, elements that a layer keeps of a token, bytes of a process.
        ranks: That measured.
    """
    per_flop = {name: seen[name] / (2 * math.prod(mnk)) for name, mnk in _OF.items()}
    sides = {name: sum(1 / side for side in mnk) for name, mnk in _OF.items()}
    slope = (per_flop["small"] - per_flop["large"]) / (sides["small"] - sides["large"])
    slope = max(slope, 0.0)
    peak = 1 / (per_flop["large"] - slope * sides["large"])
    hbm = 3 * 4 * (1 << 24) / seen["stream"]
    flops = 4 * TOKENS * TOKENS * WIDTH / 2
    products = [(TOKENS, 3 * WIDTH, WIDTH), (TOKENS, WIDTH, WIDTH)]
    products += [(TOKENS, 2 * HIDDEN, WIDTH), (TOKENS, WIDTH, HIDDEN)]
    product_s = sum(
        2 * (m * n * k / peak + (m * n + n * k + k * m) * slope) for m, n, k in products
    )
    rest = max(seen["layer"] - 3 * product_s - seen["attention"], 0.0)
    features = WIDTH + 2 * HIDDEN + 3 * WIDTH
    measured = {
        "gemm_a100": 1.0,
        "gemm_side": slope * peak,
        "flash_a100": 3.5 * flops / peak / seen["attention"],
        "passes": rest / 3 * hbm / (4 * TOKENS * features),
        "loss_passes": seen["loss"] * hbm / (4 * TOKENS * _VOCABULARY),
        "adam": seen["adam"] * hbm / (28 * _PARAMETERS),
        "recompute": 1.0,
        "host": seen["tiny_forward"],
        "host_backward": max(seen["tiny"] / seen["tiny_forward"] - 1, 0.1),
        "overlap": 0.0,  # what communicates takes the cores that would compute
        "interference": 1.0,
        "kept": max(seen["kept"] - 4 * HIDDEN - 2 * WIDTH, 1.0) / (8 * WIDTH + 2 + HEADS),
        "gathered": 1.0,
        "context": seen["held"] + _FREED,
    }
    link = hbm
    if ranks > 1:
        large, small = seen[f"all_reduce_{_BYTES}"], seen["all_reduce_8"]
        link = 2 * _BYTES * (ranks - 1) / ranks / max(large - small, 1e-9)
        message = seen[f"message_{_BYTES}"] - seen["message_8"]
        measured |= {
            "link": 1.0,
            "link_latency": small / (math.log2(ranks) * 2),
            "message": seen["message_8"],
            "message_bytes": max(message, 0.0) * link / _BYTES,
        }
    gpu = Gpu(
        name="here",
        kind="cpu",
        bf16_tflops=peak / 1e12,
        memory_gb=psutil.virtual_memory().total / ranks / 1e9,
        memory_tb_s=hbm / 1e12,
        link_gb_s=link / 1e9,
        network_gb_s=link / 1e9,
        gpus_per_node=ranks,
        source=f"measured here; {oversubscribed(ranks, 0.0) or 'a thread a rank'}",
    )
    return Machine(gpu, 1, ranks, measured)


_OF = {"large": _LARGE, "small": _SMALL}
