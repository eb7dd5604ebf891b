"""Where the ranks' error files are (`dure.errorfile`), and what the launcher reads from them.

With a log directory, a file is beside the rank's output and stays. Otherwise it is in a folder of
the job, in the folder for temporary files. The name follows from the job's name, so that the reaper
can remove it after the launcher has died. If both are killed, the next job removes it: a folder in
use is locked, and the lock ends with the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dure.errorfile import RecordedError, read_error, write_error
from dure.launch.spec import Crash, Exit, JobSpec

__all__ = [
    "error_directory",
    "error_file",
    "known_crash",
    "private_directory",
    "recorded",
    "temporary_folder",
]

_MAX_TEXT = 8_000  # characters, as of a crash that a rank reports itself
_TEMPORARY = re.compile(r"dure_(page_|spawn_)?[0-9a-f]{32}")


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
    with temporary_folder(job):
        yield


@contextlib.contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """Keep a folder `dure_NAME`, of this user alone, while the block runs.

    Folders of processes that were killed are removed first. `name` ends with 32 hexadecimal digits.

    Raises:
        OSError: It cannot be made.
    """
    _remove_abandoned()
    folder, lock = private_directory(name), None
    while lock is None:  # another process may remove it before it is locked
        os.mkdir(folder, 0o700)
        lock = _locked(folder, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob("dure_*"):
        with contextlib.suppress(OSError):
            mine = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if mine and _TEMPORARY.fullmatch(folder.name):
                lock = _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock is not None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.close(lock)


def _locked(folder: Path, how: int) -> int | None:
    """Lock a folder, and return the descriptor that keeps the lock; None if it has been removed.

    Raises:
        OSError: Another process has locked it, or its file system has no locks.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, how)
        if os.fstat(fd).st_nlink > 0 and folder.exists():
            return fd
    except OSError:
        if how & fcntl.LOCK_NB:
            os.close(fd)
            raise
        return fd  # no process can lock it here, so none removes it
    os.close(fd)
    return None


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
