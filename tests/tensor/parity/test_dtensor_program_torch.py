"""A program for torch.distributed.tensor, with its imports changed: Dure finds what torch finds."""

from __future__ import annotations

import math
import runpy
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as td

from tests.waiting import PATIENCE_S

PROGRAM = Path(__file__).parent / "programs" / "tensors.py"


def _differ(ours: Any, theirs: Any) -> bool:
    """Tell whether nested lists of numbers differ by more than rounding."""
    if isinstance(theirs, list):
        return len(ours) != len(theirs) or any(map(_differ, ours, theirs))
    return not math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12)


def compare(rank: int, folder: str, changed: str) -> None:
    """Run the program in a world of torch's, and with changed imports in this one."""
    td.init_process_group(
        "gloo", f"file://{folder}/torch", timedelta(seconds=PATIENCE_S), world_size=2, rank=rank
    )
    try:
        expected = runpy.run_path(str(PROGRAM))["find"]()
    finally:
        td.destroy_process_group()
    found = runpy.run_path(changed)["find"]()
    for ours, theirs in zip(found, expected, strict=True):
        assert not _differ(ours, theirs), (ours, theirs)


def test_a_program_with_changed_imports_finds_what_torch_finds(process_pool, tmp_path):
    text = PROGRAM.read_text()
    changed = text.replace("import torch.distributed as dist", "import dure as dist")
    (tmp_path / "program.py").write_text(changed.replace("from torch.distributed.", "from dure."))
    process_pool(2).run(compare, str(tmp_path), str(tmp_path / "program.py"))
