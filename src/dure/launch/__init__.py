"""Starting a program on several ranks, watching it, and ending it without a trace.

`run_job` is all there is to call; `dure run` and `dure demo` are views of it:

    result = run_job(JobSpec(program="train.py", args=("--epochs", "3"), nproc=2))
    result.check()  # raises LaunchError, with the first failure's traceback

Where to read: `job` (start to result), `agent` (what the hosts of a job decide together), `round`
(one start of all ranks), `loop` (what happens), `supervisor` (what to do about it), `spawn` and
`child` (a rank's process from both sides), `zygote` and `forking` (what ranks are copies of),
`environment`, `numa` and `errorfiles` (what a rank finds, where it runs, what it leaves),
`processes` and `guardian` (what belongs to a job, and who ends it), `terminal` and `output` (whose
line is whose), `report` (who failed, and where the others were).
"""

from dure.launch.job import run_job
from dure.launch.spec import (
    Crash,
    Exit,
    Frame,
    JobResult,
    JobSpec,
    Line,
    RankResult,
    Std,
    StreamChoice,
)

__all__ = [
    "Crash",
    "Exit",
    "Frame",
    "JobResult",
    "JobSpec",
    "Line",
    "RankResult",
    "Std",
    "StreamChoice",
    "run_job",
]
