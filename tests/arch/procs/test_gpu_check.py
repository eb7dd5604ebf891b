"""The script that checks a GPU: each check ends alone, and the table says how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[3] / "scripts"

PROGRAM = """
import os, runpy, sys, threading
from pathlib import Path

script, logs = sys.argv[1:]
os.environ["GPU_CHECK_DEVICE"] = "cpu"
sys.path.insert(0, os.path.dirname(script))
from gpu import checks, running
from dure.errors import UsageError

def refuses():
    raise UsageError("not here")

def fails():
    raise KeyError("x\\ny")

def dies():
    print("the last line", flush=True)
    os._exit(3)

for run in (refuses, fails, dies):
    checks.check("train", f"{run.__name__} at barriers", alone=run is fails)(run)
checks.check("train", "may refuse at barriers", may_refuse=True)(refuses)
sys.argv[1:] = ["--device", "cpu", "--only", "barriers"]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    print(f"exit status {end.code}")
running.LIMIT_S = 0.1
running.run_all([checks.Check("nccl", "hangs", threading.Event().wait)], 1, Path(logs))
os.setsid = lambda: None  # as if the limit came before the child's first line
running.run_all([checks.Check("nccl", "has no group", threading.Event().wait)], 1, Path(logs))
"""


def test_gpu_check_reports_how_each_check_ends(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, str(SCRIPTS / "gpu-check"), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    lines = done.stdout.splitlines()
    cells = [line.removesuffix(" |").split(" | ") for line in lines if line.startswith("| ")]
    assert {(name, result, said) for _, name, result, _, said, *_ in cells[2:]} == {
        ("barriers", "ok", ""),
        ("refuses at barriers", "FAILED", "UsageError: not here"),
        ("may refuse at barriers", "refused", "UsageError: not here"),
        ("fails at barriers", "FAILED", "KeyError: 'x\\ny'"),
        ("dies at barriers", "died", "exit status 3; the last line"),
        ("hangs", "limit", "no result after 0 s"),
        ("has no group", "limit", "no result after 0 s"),
    }, done.stdout + done.stderr
    assert lines[-4].endswith("2 FAILED, 1 died, 1 ok, 1 refused")
    assert lines[-3] == "exit status 1"


@pytest.mark.skipif(bool(torch.version.cuda), reason="torch has CUDA")
def test_gpu_check_needs_a_torch_that_has_cuda() -> None:
    words = [sys.executable, str(SCRIPTS / "gpu-check"), "--only", "barriers"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert "torch was built without CUDA" in done.stderr
    assert "|" not in done.stdout
