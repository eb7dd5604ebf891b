"""Where the ranks' error files are (`dure.errorfile`), and what the launcher reads from them.

With a log directory, a file is beside the rank's output and stays. Otherwise it is in a folder of
the job, in the folder for temporary files. The name follows from the job's name, so that the reaper
can remove it after the launcher has died.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dure.errorfile import RecordedError, read_error, write_error
from dure.launch.spec import Crash, Exit, JobSpec

__all__ = [
    "error_file",
    "known_crash",
    "private_directory",
    "recorded",
    "temporary_folder",
]

_MAX_TEXT = 8_000  # characters, as of a crash that a rank reports itself


def private_directory(job: str) -> Path:
    """Return the directory of the job named `job`, whether or not it exists."""
    return Path(tempfile.gettempdir()) / f"dure_{job}"


@contextlib.contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """Keep a folder `dure_NAME`, of this user alone, while the block runs.

    Raises:
        OSError: It cannot be made.
    """
    folder = private_directory(name)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def error_file(spec: JobSpec, job: str, rank: int, attempt: int) -> Path:
    if spec.log_dir is None:
        return private_directory(job) / f"attempt_{attempt}_rank_{rank}.json"
    return spec.log_dir.absolute() / f"attempt_{attempt}" / f"rank_{rank}" / "error.json"


def known_crash(path: Path, reported: Crash | None, status: Exit) -> Crash | None:
    """Return how a rank crashed, from its report to the launcher or else from its error file.

    The report is written to the file, unless the program has written one.
    """
    if reported is None:
        return None if status.ok else _crash_in(path, status)
    if path.parent.is_dir() and not path.exists():
        with contextlib.suppress(OSError):  # the summary has the same
            write_error(path, recorded(reported))
    return reported


def _crash_in(path: Path, status: Exit) -> Crash | None:
    error = read_error(path)
    if error is None:
        return None
    return Crash(
        type=error.type or "error",
        message=error.message.removeprefix(f"{error.type}: ")[:_MAX_TEXT],
        traceback=(error.traceback or error.message)[-_MAX_TEXT:],
        exit_code=status.code or error.exit_code or 1,
    )


def recorded(crash: Crash) -> RecordedError:
    return RecordedError(
        message=f"{crash.type}: {crash.message}",
        traceback=crash.traceback,
        exit_code=crash.exit_code,
    )
