"""How stock torch.distributed finds the plug-in "dure", with an import and without."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import dure.torch_backend
from tests.torch_backend.torch_worlds import in_pool, td, world
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]


def default(rank: int, folder: str) -> None:
    backends = td.Backend.default_device_backend_map
    before = backends["cpu"]
    assert before == "gloo"
    dure.torch_backend.register()
    assert backends["cpu"] == "gloo"
    try:
        dure.torch_backend.make_default()
        with world(rank, folder, backend=None) as group:
            assert td.get_default_backend_for_device("cpu") == "dure"
            assert group.name() == "dure"
            td.barrier()
    finally:
        backends["cpu"] = before


test_default = in_pool(default)


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
