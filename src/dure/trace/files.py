"""Files of the flight recorder: where they are written, and their format (version 2).

A file is one JSON object with these fields:

* `format`, `version`, `needs`: the format, and the releases that read it;
* `rank`, `world_size`, `host`, `boot`, `pid`, `job`: the rank that wrote it;
* `reason`: why it was written;
* `clock`: two clocks read at the same time, `time.monotonic_ns` and the time of day. All other
  times are `time.monotonic_ns`, which the processes of a host share; `clock` relates hosts;
* `groups`: the groups that the rank is or was in. The global ranks of the members are in `ranges`,
  each as the first one, their number, and the distance between two. Version 1 had a list of all
  members in `ranks`, so the files of a large job grew with the square of its ranks;
* `records`: its last operations by start time (`Record`);
* `spans`, `marks`: phases of its last steps and values reported for them, if they were recorded
  (`Span`, `Mark`);
* `threads`: the Python stack of each thread, innermost frame last.

Files are written under a temporary name and renamed, with mode 0600, because they name files and
functions of the program. Without DURE_TRACE_DIR they are written below the user's state directory,
one folder per job; the newest folders are kept.
"""

from __future__ import annotations

import itertools
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from dure import env
from dure.trace.marks import Mark
from dure.trace.record import Origin, Record
from dure.trace.spans import Span

__all__ = ["CRASHED", "FORMAT", "VERSION", "Target", "ranges_of", "target", "wanted", "write"]

FORMAT, VERSION = "dure-flight", 2
_NEEDS = "dure>=0.2"
CRASHED = "ended by "
"""Prefix of `reason` if an exception ended the rank; the exception follows."""
_MAX_JOBS = 20
_MAX_FRAMES = 100
_OFF = "off"
_serial = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to write: a folder, and the name of the file if the user gave one."""

    folder: Path
    name: str = ""

    def file(self, rank: int) -> Path:
        """Return the file of a rank."""
        default = f"rank{rank}.json" if rank >= 0 else f"pid{os.getpid()}.json"
        return self.folder / (self.name or default)


def wanted() -> bool:
    """Return whether ranks write a file after an error."""
    return (env.text("DURE_TRACE_DIR") or "").lower() != _OFF


def target(directory_or_path: Path | str | None, job: str) -> Target:
    """Return where to write; the default is DURE_TRACE_DIR, else a folder of the job."""
    if directory_or_path is not None:
        path = Path(directory_or_path)
        if path.suffix == ".json":
            return Target(folder=path.parent, name=path.name)
        return Target(folder=path)
    named = env.text("DURE_TRACE_DIR")
    if named and named.lower() != _OFF:
        return Target(folder=Path(named))
    home = env.text("XDG_STATE_HOME")
    jobs = (Path(home) if home else Path.home() / ".local" / "state") / "dure" / "trace"
    jobs.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = jobs / _folder_name(job)
    _prune(jobs, folder)
    return Target(folder=folder)


_began = time.strftime("%Y%m%d-%H%M%S")


def _folder_name(job: str) -> str:
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in job).strip(".")
    return plain or f"{_began}-{os.getpid()}"


def _prune(jobs: Path, mine: Path) -> None:
    """Remove flight records of old jobs; other files are kept."""
    with suppress(OSError):
        others = [p for p in jobs.iterdir() if p.is_dir() and not p.is_symlink() and p != mine]
        others.sort(key=lambda p: p.stat().st_mtime, reverse=True)
        for folder in others[_MAX_JOBS - 1 :]:
            with suppress(OSError):  # another rank prunes too, or the user keeps something there
                for pattern in ("rank*.json", "pid*.json"):
                    for path in folder.glob(pattern):
                        path.unlink()
                folder.rmdir()


def write(
    to: Target,
    *,
    rank: int,
    groups: Sequence[Origin],
    records: Sequence[Record],
    spans: Sequence[Span] = (),
    marks: Sequence[Mark] = (),
    job: str,
    reason: str,
) -> Path:
    """Write the file of one rank, atomically: a reader sees the complete old or new file.

    Args:
        to: Where to write.
        rank: Global rank; -1 if the process has no rank yet.
        groups: Groups that the rank is or was in.
        records: Its last operations.
        spans: Phases of its last steps.
        marks: Values that its program reported for steps.
        job: Name of the job.
        reason: Why the file is written.

    Returns:
        The file.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "needs": _NEEDS,
        "rank": rank,
        "world_size": max((1 + max(g.global_ranks) for g in groups), default=1),
        "host": platform.node(),
        "boot": _boot(),
        "pid": os.getpid(),
        "job": job,
        "reason": reason,
        "clock": {"monotonic_ns": time.monotonic_ns(), "time_ns": time.time_ns()},
        "groups": [
            {
                "name": g.group,
                "rank": g.rank,
                "ranges": ranges_of(g.global_ranks),
                "backend": g.backend,
            }
            for g in groups
        ],
        "records": list(records),
        "spans": list(spans),
        "marks": list(marks),
        "threads": _threads(),
    }
    to.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = to.file(rank)
    # The name is unique: a signal handler may interrupt a dump and write another.
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{next(_serial)}.part")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(content))
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return path


def ranges_of(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return numbers, in their order, as ranges: the first, how many, and the distance.

    Example:
        >>> ranges_of([0, 1, 2, 3])
        [(0, 4, 1)]
        >>> ranges_of([4, 0, 8, 16, 3])
        [(4, 2, -4), (8, 2, 8), (3, 1, 1)]
    """
    found: list[tuple[int, int, int]] = []
    at = 0
    while at < len(numbers):
        first, end = numbers[at], at + 1
        step = numbers[end] - first if end < len(numbers) else 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        found.append((first, end - at, step))
        at = end
    return found


def _boot() -> str:
    """Return the id of this boot of the host, whose processes share a clock; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _threads() -> list[dict[str, object]]:
    """Return where each Python thread is now, the main thread first."""
    names = {t.ident: t.name for t in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)  # pyright: ignore[reportPrivateUsage]
    return [
        {"name": names.get(ident, f"thread {ident}"), "main": ident == main, "stack": _stack(frame)}
        for ident, frame in frames
    ]


def _stack(frame: FrameType | None) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        code = frame.f_code
        found.append(
            {"file": code.co_filename, "line": frame.f_lineno, "function": code.co_qualname}
        )
        frame = frame.f_back
    return found[::-1]
