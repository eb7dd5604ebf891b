"""A program for torch.distributed.tensor, with its imports changed: Dure finds what torch finds."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "programs" / "tensors.py"
RANKS = "2"


def _started(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _found(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return json.loads(output.partition("FOUND")[2].partition("\n")[0])


def _differ(ours: Any, theirs: Any) -> bool:
    """Tell whether nested lists of numbers differ by more than rounding."""
    if isinstance(theirs, list):
        return len(ours) != len(theirs) or any(map(_differ, ours, theirs))
    return not math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12)


@pytest.mark.timeout(180)  # torchrun needs seconds to start
def test_a_program_with_changed_imports_finds_what_torch_finds(tmp_path):
    text = PROGRAM.read_text()
    changed = text.replace("import torch.distributed as dist", "import dure as dist")
    changed = changed.replace("from torch.distributed.", "from dure.")
    (tmp_path / "program.py").write_text(changed)
    theirs = _started(
        "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS, str(PROGRAM)
    )
    ours = _started("dure.cli", "run", "--nproc", RANKS, str(tmp_path / "program.py"))
    expected, found = _found(theirs), _found(ours)
    for ours_of_part, theirs_of_part in zip(found, expected, strict=True):
        assert not _differ(ours_of_part, theirs_of_part), (ours_of_part, theirs_of_part)
