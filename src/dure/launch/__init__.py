"""Starting a program on several ranks, watching it, and ending it without a trace.

`run_job` is all there is to call; `dure run` and `dure demo` are views of it:

    result = run_job(JobSpec(program="train.py", args=("--epochs", "3"), nproc=2))
    result.check()  # raises LaunchError, with the first failure's traceback

Where to read: `job` and `launcher` (start to result), `local` (one host), `agent` (several hosts),
`clusters` (how `dure run` is started on them), `round` (one start of all ranks), `supervisor` (when
and how to end them), `ranks` (a rank's process), `show` (the output that users see).
"""

from typing import TYPE_CHECKING

from dure.launch import _linux as _linux  # first: it raises where there is no launching
from dure.launch.job import run_job
from dure.launch.spec import (
    Crash,
    Exit,
    JobResult,
    JobSpec,
    Line,
    RankResult,
    StackFrame,
    Std,
    StreamChoice,
)
from dure.torch_names import lazy_names

__all__ = [
    "Crash",
    "Exit",
    "JobResult",
    "JobSpec",
    "Line",
    "RankResult",
    "StackFrame",
    "Std",
    "StreamChoice",
    "run_job",
]

_HOMES: dict[str, tuple[str, ...]] = {
    "dure.run": ("main",),
}

if TYPE_CHECKING:
    # Written by scripts/public_names:
    # fmt: off
    # isort: off
    from dure.launch import torch_launcher as torch_launcher
    from dure.run import main as main
    # isort: on
    # fmt: on
else:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
