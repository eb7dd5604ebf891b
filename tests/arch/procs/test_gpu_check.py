"""The script that checks a GPU: each check ends alone, and the table says how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[3] / "scripts"

PROGRAM = """
import os, sys, threading
from pathlib import Path

sys.path.insert(0, sys.argv[1])
os.environ["GPU_CHECK_DEVICE"] = "cpu"
from gpu import checks, running
from dure.errors import UsageError

def refuses():
    raise UsageError("not here")

def fails():
    raise KeyError("x\\ny")

def dies():
    print("the last line", flush=True)
    os._exit(3)

ends = [lambda: 7, refuses, fails, dies]
given = [checks.Check("nccl", f"check {n}", run, alone=n == 2) for n, run in enumerate(ends)]
counts = running.run_all(given, 2, Path(sys.argv[2]))
running.LIMIT_S = 0.1
hangs = checks.Check("nccl", "hangs", threading.Event().wait)
print({**counts, **running.run_all([hangs], 1, Path(sys.argv[2]))})
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def test_gpu_check_tells_every_end_of_a_check(tmp_path: Path) -> None:
    done = run("-c", PROGRAM, str(SCRIPTS), str(tmp_path))
    *rows, counts = done.stdout.splitlines()
    cells = [row.split(" | ") for row in rows]
    found = {name: (result, said.removesuffix(" |")) for _, name, result, _, said in cells}
    assert found == {
        "check 0": ("ok", "7"),
        "check 1": ("refused", "UsageError: not here"),
        "check 2": ("FAILED", "KeyError: 'x\\ny'"),
        "check 3": ("died", "exit status 3; the last line"),
        "hangs": ("limit", "no result after 0 s"),
    }, done.stderr
    assert counts == "{'ok': 1, 'refused': 1, 'FAILED': 1, 'died': 1, 'limit': 1}"


def test_gpu_check_on_the_cpu_has_no_failure() -> None:
    done = run(str(SCRIPTS / "gpu-check"), "--device", "cpu", "--only", "barriers")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| nccl | barriers | ok |" in done.stdout
