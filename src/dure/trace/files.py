"""Where the flight recorder's files lie, and what is in one: format 1.

A file is one JSON object: its format (`format`, `version`, and in `needs` the releases that read
it), which rank wrote it (`rank`, `world_size`, `host`, `boot`, `pid`, `job`),
why (`reason`), two clocks read together (`clock`), the groups it was in, its records by their start
(`records`, with the fields of `Record`), what its last steps were made of, where that was recorded
(`spans`, with the fields of `Span`), what its program said of them (`marks`, with the fields of
`Mark`), and the Python stack of each of its threads (`threads`,
innermost frame last). Times are `time.monotonic_ns`, which all processes of a host share; `clock`
relates them to the time of day, and so to other hosts.

Files are written under a temporary name and renamed, with mode 0600: they name files of the program
and its functions. Without DURE_TRACE_DIR they lie below the user's state directory, a folder a job,
of which the newest are kept.
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

__all__ = ["CRASHED", "FORMAT", "VERSION", "Target", "target", "wanted", "write"]

FORMAT, VERSION = "dure-flight", 1
_NEEDS = "dure>=0.2"
CRASHED = "ended by "
"""How the reason of a file begins whose rank an exception has ended; the exception follows."""
_MAX_JOBS = 20
_MAX_FRAMES = 100
_OFF = "off"
_serial = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to write: a folder, and the file in it where that was named."""

    folder: Path
    name: str = ""

    def file(self, rank: int) -> Path:
        """Return the file of a rank."""
        return self.folder / (self.name or (f"rank{rank}.json" if rank >= 0 else _nameless()))


def _nameless() -> str:
    return f"pid{os.getpid()}.json"


def wanted() -> bool:
    """Tell whether errors are to be followed by a dump."""
    return (env.text("DURE_TRACE_DIR") or "").lower() != _OFF


def target(directory_or_path: Path | str | None, job: str) -> Target:
    """Return where to write; what is not named is DURE_TRACE_DIR or the job's own folder."""
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
    """Remove the files of all jobs but the newest; whatever else lies there stays."""
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
    """Write the file of one rank; a reader sees the old one or the new one, whole.

    Args:
        to: Where.
        rank: Global rank; -1 where there is none (yet).
        groups: Groups that it is or was in.
        records: Its last operations.
        spans: What its last steps were made of, where that was recorded.
        marks: What its program said of its steps.
        job: Name of the job.
        reason: Why it is written.

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
            {"name": g.group, "rank": g.rank, "ranks": list(g.global_ranks), "backend": g.backend}
            for g in groups
        ],
        "records": list(records),
        "spans": list(spans),
        "marks": list(marks),
        "threads": _threads(),
    }
    to.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = to.file(rank)
    # A name of this dump's own: a signal handler may dump while its thread does.
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


def _boot() -> str:
    """Return what tells this host's clock from that of every other; empty where it is not known."""
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
