"""The plug-in "dure" of stock torch.distributed: the traps of such a plug-in, one by one.

The programs are in `torch_ranks`; two processes run them. The last tests are about how torch finds
the plug-in without an import.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from dure.testing import ProcessPool
from procs import torch_ranks as ranks
from procs import torch_ranks_beside as beside
from waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]

TRAPS = {
    "1: a work that only C++ holds lives until it is waited for": ranks.dropped_works,
    "2: C++ sees the error of a future": ranks.errors_in_backward,
    "3: wait raises": ranks.errors_in_wait,
    "4: no limit is said in four ways": ranks.limits_of_wait,
    "5: isend does not block": ranks.sends_before_receives,
    "6: futures come at once, and data move without waiting": ranks.progress_without_waiting,
    "7 and 8: rank, store and names": ranks.identity,
    "9: coalescing": ranks.coalescing,
    "10: torch.compile": ranks.compiled,
    "11: reductions are objects, tensors come in lists": ranks.reductions,
    "12: the default for CPU tensors": ranks.default,
    "13: what torch's Python keeps for Gloo and accelerators": ranks.beside_torch,
}


@pytest.mark.parametrize("trap", TRAPS)
def test_trap(trap: str, process_pool: Callable[..., ProcessPool], tmp_path: Path):
    process_pool(2, "shm").run(TRAPS[trap], str(tmp_path))


OTHERS = [
    beside.profiled,
    beside.unequal_calls,
    beside.left_without_a_word,
    beside.experimental_api,
]


@pytest.mark.parametrize("program", OTHERS, ids=lambda p: p.__name__)
def test_program(
    program: Callable[[int, str], None], process_pool: Callable[..., ProcessPool], tmp_path: Path
):
    process_pool(2, "shm").run(program, str(tmp_path))


def test_ranks_of_two_hosts_get_shared_memory_inside_and_gloo_between(tmp_path: Path):
    with ProcessPool(2, "hybrid", hosts="ab") as pool:
        pool.run(beside.over_hosts, str(tmp_path))


# ---- found without an import ---------------------------------------------------------------------


def _installed(folder: Path) -> str:
    """Write what an installer writes of our entry points; return the search path with it."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    made = folder / "dure-0.1.0.dist-info"
    made.mkdir()
    made.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: dure\nVersion: 0.1.0\n")
    lines = [
        f"[{group}]\n" + "\n".join(f"{name} = {where}" for name, where in entries.items())
        for group, entries in points.items()
    ]
    made.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")
    return f"{folder}:{ROOT / 'src'}"


def _run(code: str, path: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_torch_registers_and_loads_nothing_of_ours(tmp_path: Path):
    code = """
import sys, torch
print(torch.distributed.Backend.DURE)
print(*sorted(m for m in sys.modules if m.split(".")[0] == "dure"))
"""
    assert _run(code, _installed(tmp_path)) == ["dure", "dure", "dure.torch_backend"]


def test_broken_installation_breaks_no_other_program(tmp_path: Path):
    code = """
import sys
for name in ("comm", "native", "store", "env", "errors"):
    sys.modules[f"dure.{name}"] = None
import torch, torch.distributed as td
try:
    td.init_process_group("dure", store=td.HashStore(), rank=0, world_size=1)
except ImportError:
    print("said", "so")
td.init_process_group("gloo", store=td.HashStore(), rank=0, world_size=1)
td.barrier()
td.destroy_process_group()
print("fine")
"""
    assert _run(code, _installed(tmp_path)) == ["said", "so", "fine"]


def test_package_may_be_imported_before_torch(tmp_path: Path):
    code = """
import dure.torch_backend, torch
print(torch.distributed.Backend.DURE)
"""
    assert _run(code, _installed(tmp_path)) == ["dure"]
