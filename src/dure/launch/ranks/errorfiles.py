"""Where the ranks' error files are (`dure.errorfile`), and what the launcher makes of them.

With a log directory a file lies beside the rank's output, and stays. Otherwise it lies in a
directory for the job alone, below the one for temporary files. Its name follows from the job's, so
that whoever cleans up after the job can find it: the launcher, or its reaper if it was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dure.errorfile import RecordedError, read_error, write_error
from dure.launch.spec import Crash, Exit, JobSpec

__all__ = ["error_directory", "error_file", "known_crash", "private_directory", "recorded"]

_LONGEST_TEXT = 8_000  # characters, as of a crash that a rank tells itself


def private_directory(job: str) -> Path:
    """Return the directory of the job named `job`, whether or not it exists."""
    return Path(tempfile.gettempdir()) / f"dure_{job}"


@contextlib.contextmanager
def error_directory(spec: JobSpec, job: str) -> Iterator[None]:
    """Keep a place for error files while the job runs.

    Raises:
        OSError: It cannot be made.
    """
    if spec.log_dir is not None:
        yield
        return
    directory = private_directory(job)
    os.mkdir(directory, 0o700)
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def error_file(spec: JobSpec, job: str, rank: int, attempt: int) -> Path:
    if spec.log_dir is None:
        return private_directory(job) / f"attempt_{attempt}_rank_{rank}.json"
    return spec.log_dir.absolute() / f"attempt_{attempt}" / f"rank_{rank}" / "error.json"


def known_crash(path: Path, told: Crash | None, exit: Exit) -> Crash | None:
    """Return how a rank crashed, by what it told the launcher or else by its error file.

    What it told is left in the file, unless the program has done so.
    """
    if told is None:
        return None if exit.ok else _crash_in(path, exit)
    if path.parent.is_dir() and not path.exists():
        with contextlib.suppress(OSError):  # the summary tells the same
            write_error(path, recorded(told))
    return told


def _crash_in(path: Path, exit: Exit) -> Crash | None:
    error = read_error(path)
    if error is None:
        return None
    return Crash(
        type=error.type or "error",
        message=error.message.removeprefix(f"{error.type}: ")[:_LONGEST_TEXT],
        traceback=(error.traceback or error.message)[-_LONGEST_TEXT:],
        exit_code=exit.code or error.exit_code or 1,
    )


def recorded(crash: Crash) -> RecordedError:
    return RecordedError(
        message=f"{crash.type}: {crash.message}",
        traceback=crash.traceback,
        exit_code=crash.exit_code,
    )
