"""Flight recorder: what every rank did last, kept always, and written down when something is wrong.

A *source* keeps the last operations of one rank in one group: the shm engine's own ring, or a
`FlightRing`. Sources are known here from `add_source` until `retire`, weakly; what a retired one
kept survives it, because the end of a group is when its story is wanted.

A *dump* writes the last `CAPACITY` operations of each rank of this process, and where its threads
are now, to one JSON file a rank (`files`). It happens when the program asks (`dump`), when somebody
sends SIGUSR2 (`signals`), and when an operation of a group first fails because of other ranks
(`on_error`), in which case a note in the error says where the file is. `dure trace merge` reads the
files of all ranks.

Threads: everything here may be called from any thread, and from a signal handler.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

from dure import env
from dure.errors import CommTimeout, Desync, DureError, PeerLost
from dure.trace import files
from dure.trace.marks import Mark, Marks
from dure.trace.record import Origin, Record, Source
from dure.trace.ring import CAPACITY, FlightRing, Noted
from dure.trace.spans import Keeper

__all__ = [
    "CAPACITY",
    "FlightRing",
    "Noted",
    "Origin",
    "Record",
    "Source",
    "add_source",
    "dump",
    "forget",
    "job",
    "mark",
    "on_crash",
    "on_error",
    "publish",
    "read_steps",
    "record_steps",
    "recorded",
    "recording",
    "renumber",
    "retire",
    "set_job",
]

T = TypeVar("T")
_LATELY_NS, _AT_LEAST = 5_000_000_000, 60
_ERRORS = (Desync, PeerLost, CommTimeout)


class _Recorder:
    """All sources of the process, and what retired ones kept."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: the process is a forked child, and the groups are its parent's.

        So is whoever held the lock at that moment.
        """
        self.lock = threading.RLock()  # a signal handler may dump while its thread is in here
        self.sources: WeakSet[Source] = WeakSet()
        self.retired: dict[int, deque[Record]] = {}
        self.origins: deque[Origin] = deque(maxlen=64)
        self.dumped: dict[tuple[str, int], Path | None] = {}
        self.spans = Keeper()
        self.marks = Marks()
        self.job = ""

    def known(self) -> dict[int, list[Origin]]:
        """Return every rank of the process with the groups that it is, or was lately, in."""
        with self.lock:
            origins = [*self.origins, *(s.origin for s in list(self.sources))]
        found: dict[int, dict[str, Origin]] = {}
        for origin in origins:  # a group that was made again replaces the one of its name
            found.setdefault(origin.global_rank, {})[origin.group] = origin
        return {rank: list(groups.values()) for rank, groups in found.items()}

    def records(self, rank: int, last: int | None = None) -> list[Record]:
        """Return the last operations of a rank, by their start; `last`: so many of each source."""
        with self.lock:
            found = list(self.retired.get(rank, ()))[-last if last else 0 :]
            sources = [s for s in list(self.sources) if s.origin.global_rank == rank]
        for source in sources:
            found += source.records(last)
        return sorted(found, key=lambda r: r.start_ns)[-CAPACITY:]


_recorder = _Recorder()
os.register_at_fork(after_in_child=_recorder.clear)


def add_source(source: Source) -> None:
    """Let dumps show what `source` keeps; it is held weakly."""
    origin = source.origin
    with _recorder.lock:
        _recorder.sources.add(source)
        _recorder.dumped.pop((origin.group, origin.global_rank), None)


def retire(source: Source) -> None:
    """Keep what `source` has kept, and let go of it; nothing happens where it is not known."""
    with _recorder.lock:
        if source not in _recorder.sources:
            return
        _recorder.sources.discard(source)
        origin = source.origin
        kept = _recorder.retired.setdefault(origin.global_rank, deque(maxlen=CAPACITY))
        kept.extend(source.records())
        _recorder.origins.append(origin)


def forget(source: Source) -> None:
    """Let go of `source`: what it keeps is part of operations that another one keeps."""
    with _recorder.lock:
        _recorder.sources.discard(source)


def renumber(group: str, rank: int, global_ranks: tuple[int, ...]) -> None:
    """Go on with new global ranks, after all groups but one were left.

    What was done under the old numbers is forgotten, and the job has another name from here on: the
    files of both would not fit together.

    Args:
        group: The group that is left.
        rank: This rank's old number.
        global_ranks: The new number of each rank of the group.
    """
    with _recorder.lock:
        _recorder.retired.pop(rank, None)
        others = [o for o in _recorder.origins if o.global_rank != rank]
        _recorder.origins = deque(others, maxlen=_recorder.origins.maxlen)
        for source in list(_recorder.sources):
            if source.origin.group == group and source.origin.global_rank == rank:
                source.origin = replace(source.origin, global_ranks=global_ranks)
        if not _recorder.job.endswith(group):  # ranks may be threads
            _recorder.job += f" {group}"


def set_job(name: str) -> None:
    """Name the job whose ranks these are, so that the files of its ranks come to lie together."""
    _recorder.job = name


def job() -> str:
    """Return the name of the job; empty where there is none."""
    return _recorder.job


def recording() -> bool:
    """Tell whether any group of this process is being recorded."""
    with _recorder.lock:
        return len(_recorder.sources) > 0


def recorded(rank: int | None = None) -> list[Record]:
    """Return the last operations of a global rank, or of all ranks of this process."""
    ranks: Iterable[int] = _recorder.known() if rank is None else [rank]
    found = [record for r in ranks for record in _recorder.records(r)]
    return sorted(found, key=lambda r: r.start_ns)


def dump(
    directory_or_path: Path | str | None = None,
    *,
    rank: int | None = None,
    reason: str = "dump()",
) -> Path:
    """Write what the ranks of this process did last, one JSON file a rank (`rank3.json`).

    Args:
        directory_or_path: A directory (made if missing), or the file, where its name ends with
            ".json". None: DURE_TRACE_DIR, or the job's folder in the user's state directory.
        rank: Write for this global rank alone.
        reason: Why, as the file tells its reader.

    Returns:
        The file; the directory, where the process has several ranks (threads).

    Raises:
        OSError: It could not be written.
    """
    known = _recorder.known()
    ranks = sorted(known) if rank is None else [rank]
    target = files.target(directory_or_path, _recorder.job)
    written = [
        files.write(
            target,
            rank=r,
            groups=known.get(r, []),
            records=_recorder.records(r),
            spans=_recorder.spans.of(r),
            marks=_recorder.marks.last(),
            job=_recorder.job,
            reason=reason,
        )
        for r in ranks or [-1]
    ]
    return written[0] if len(written) == 1 else written[0].parent


@contextmanager
def record_steps(directory: Path | str | None = None) -> Generator[None]:
    """Record what steps are made of, for the block: phases, and the buckets of gradients.

    `DistributedDataParallel` and `StepMeter` tell of them; `dump` writes the last of them beside
    the operations, and ``dure trace merge DIRECTORY -o timeline.json`` draws all ranks together.

    Args:
        directory: Dump there at the end, however the block ends; a file a rank.

    Cost: some 2 microseconds a phase or bucket, inside the block alone.
    """
    read_steps(True)
    try:
        yield
    finally:
        read_steps(False)
        if directory is not None:
            dump(directory, reason="record_steps()")


def read_steps(wanted: bool) -> None:
    """Keep spans and marks from now on, or no longer, where nobody else wants them."""
    (_recorder.spans.start if wanted else _recorder.spans.stop)()
    _recorder.marks.num_readers += 1 if wanted else -1


def mark(what: Mark) -> None:
    """Keep what the program says of a step, if somebody reads."""
    _recorder.marks.keep(what)


def publish(folder: Path, reason: str, most: tuple[int, int, int]) -> None:
    """Write the newest of each rank of this process, in short.

    Args:
        folder: Where; a file a rank.
        reason: Why, as the files tell their reader.
        most: How many operations of each group, and spans and marks of each rank, at most; of
            the latter those of the last seconds.

    Raises:
        OSError: It could not be written.
    """
    known = _recorder.known() or {env.integer("RANK", -1) or 0: []}
    records, spans, marks = most
    since_ns = time.monotonic_ns() - _LATELY_NS
    for rank, groups in known.items():
        files.write(
            files.Target(folder=folder),
            rank=rank,
            groups=groups,
            records=_recorder.records(rank, records),
            spans=_lately(_recorder.spans.of(rank, spans), lambda span: span.end_ns > since_ns),
            marks=_lately(_recorder.marks.last(marks), lambda mark: mark.time_ns > since_ns),
            job=_recorder.job or env.text("DURE_LAUNCHER") or "",  # the world may be left
            reason=reason,
        )


def _lately(found: list[T], is_new: Callable[[T], bool]) -> list[T]:
    """Return what is new, and some more where little is: a step may take minutes."""
    num_new = sum(map(is_new, found))
    return found[-max(num_new, _AT_LEAST) :]


def on_crash(error: BaseException) -> None:
    """Dump where DURE_TRACE_DIR asks for it: `error` ends this rank's program. Never raises.

    A rank that fails outside of an operation (in `new_group`, in a file's reading) leaves no other
    word, and would look as one that was killed.
    """
    if not env.text("DURE_TRACE_DIR") or not files.wanted() or isinstance(error, SystemExit):
        return
    with suppress(Exception):
        if _recorder.known() and not any(_recorder.dumped.values()):
            _recorder.job = _recorder.job or env.text("DURE_LAUNCHER") or ""  # the world was left
            try:
                dump(reason=f"{files.CRASHED}{type(error).__name__}: {error}")
            except OSError as e:
                error.add_note(f"No flight record could be written: {e}")


def on_error(error: DureError, rank: int | None = None) -> None:
    """Dump once for each group that fails here because of other ranks; note in `error` where.

    Never raises, so that nothing hides the error itself. Does nothing for other kinds of errors,
    or with DURE_TRACE_DIR=off.

    Args:
        error: What is about to be raised.
        rank: Global rank that it is raised on; None where the process has only one.
    """
    if not isinstance(error, _ERRORS) or error.group is None or not files.wanted():
        return
    with suppress(Exception):
        if rank is None:
            rank = next(iter(_recorder.known()), -1)
        key = (error.group, rank)
        with _recorder.lock:
            first = key not in _recorder.dumped
            if first:
                _recorder.dumped[key] = None
        if first:
            reason = f"{type(error).__name__}: {error}"
            try:
                _recorder.dumped[key] = dump(rank=rank, reason=reason)
            except OSError as e:
                error.add_note(f"No flight record could be written: {e}")
        path = _recorder.dumped[key]
        if path is not None:
            note = f"Flight record: {path} (dure trace merge {path.parent})"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
