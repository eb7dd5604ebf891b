"""Running a job: from its description to its result.

The process that ranks are forked from (`ranks.zygote`) starts first: it imports torch while the
launcher imports the rest (`launcher`).
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from dure.errors import LaunchError, StoreError
from dure.launch.program import check_program
from dure.launch.ranks.cores import threads_for
from dure.launch.ranks.zygote import zygote_for
from dure.launch.signals import caught_signals

if TYPE_CHECKING:
    from dure.launch.spec import JobResult, JobSpec

__all__ = ["run_job"]

_OURS_ALONE = 0o700  # logs may have secrets


def run_job(spec: JobSpec) -> JobResult:
    """Start the ranks of a job on this host, show their output, and return when all have ended.

    If a rank fails, all others are ended with everything they started, and all start again while
    restarts are left (but see `JobSpec.keep_going` and `elastic`). SIGINT, SIGTERM and SIGHUP end
    the job as well, if this is called on the main thread. When it returns, or raises, no process of
    the job is left on this host. A job on several hosts (`JobSpec.endpoint`) ends on all of them,
    for the same reason.

    Args:
        spec: What to start.

    Returns:
        What became of each rank. A failure of the program is a result, not an exception: see
        `JobResult.check`.

    Raises:
        UsageError: The job cannot be started as asked: no such file or module, no process.
        LaunchError: This host does not let us start it: no memory, no port, no log directory; or
            the job's other hosts cannot be found.

    Threads:
        One job at a time in a process, for signals and orphans are the process's.

    Cost:
        A fresh interpreter per rank (some 30 ms of processor time, and its imports); with a zygote,
        one import for all of them, and some 20 ms per rank.

    Example:
        ```python
        from dure import launch

        if dist.get_rank() == 0:
            Path("hello.py").write_text("print('hello')")
            spec = launch.JobSpec(program="hello.py", nproc=2, quiet=True)
            assert launch.run_job(spec).exit_code == 0
        ```
    """
    check_program(spec)
    started = time.monotonic()
    try:
        if spec.log_dir is not None:
            spec.log_dir.mkdir(parents=True, exist_ok=True, mode=_OURS_ALONE)
        if spec.trace_dir is not None:
            spec.trace_dir.mkdir(parents=True, exist_ok=True)
        name, notes = uuid.uuid4().hex, list[str]()
        with (
            caught_signals(spec.signals) as signals,  # from now on they wait in a pipe
            zygote_for(spec, name, threads_for(spec), notes.append) as zygote,
        ):
            from dure.launch.launcher import launch  # lazy: while the zygote imports

            return launch(spec, name, notes, zygote, signals, started)
    except StoreError as error:  # it says itself what to do
        raise LaunchError("the job could not be started", seen=str(error)) from error
    except OSError as error:
        raise LaunchError(
            "the job could not be started",
            seen=": ".join(str(t) for t in (error.filename, error.strerror) if t) or str(error),
            fix="See what is used up (`ulimit -a`, `df`), or may not be written (`ls -ld`).",
        ) from error
