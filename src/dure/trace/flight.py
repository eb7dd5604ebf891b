"""Flight recorder: the last operations of every rank, written to files after an error.

A *source* records the last operations of one rank in one group: the ring of the shm engine, or a
`FlightRing`. The recorder refers to a source weakly from `add_source` until `retire`. It keeps the
records of retired sources, because they are most useful after a group has ended.

A *dump* writes the last `CAPACITY` operations of each rank of this process, and the stacks of its
threads, to one JSON file per rank (`files`). There are four reasons for a dump: the program calls
`dump`, the process gets SIGUSR2 (`signals`), the launcher finds that the job hangs (`on_hang`), or
an operation of a group fails for the first time because of other ranks (`on_error`), which adds a
note with the file's path to the error.
`dure trace merge` reads the files of all ranks.

Threads:
    Every function may be called from any thread, and from a signal handler.
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
from dure.trace.marks import Mark
from dure.trace.record import Origin, Record, RecordSource
from dure.trace.ring import CAPACITY, FlightRing, Noted
from dure.trace.spans import SpanRecorder

__all__ = [
    "CAPACITY",
    "FlightRing",
    "Noted",
    "Origin",
    "Record",
    "RecordSource",
    "add_source",
    "dump",
    "forget",
    "job",
    "mark",
    "on_crash",
    "on_error",
    "on_hang",
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
_MARKS = 5000
_ERRORS = (Desync, PeerLost, CommTimeout)


class _Recorder:
    """The sources of the process, and the records of retired ones."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start empty: in a forked child, groups and lock belong to the parent's threads."""
        self.lock = threading.RLock()  # a signal handler may dump while its thread is in here
        self.sources: WeakSet[RecordSource] = WeakSet()
        self.retired: dict[int, deque[Record]] = {}
        self.origins: deque[Origin] = deque(maxlen=64)
        self.dumped: dict[tuple[str, int], Path | None] = {}
        self.spans = SpanRecorder()
        self.marks = deque[Mark](maxlen=_MARKS)
        self.num_readers = 0  # of spans and marks
        self.job = ""

    def known(self) -> dict[int, list[Origin]]:
        """Return the ranks of this process, each with its current and recent groups."""
        with self.lock:
            origins = [*self.origins, *(s.origin for s in list(self.sources))]
        found: dict[int, dict[str, Origin]] = {}
        for origin in origins:  # a group that was made again replaces the one of its name
            found.setdefault(origin.global_rank, {})[origin.group] = origin
        return {rank: list(groups.values()) for rank, groups in found.items()}

    def records(self, rank: int, last: int | None = None) -> list[Record]:
        """Return the last operations of a rank by start time; at most `last` of each source."""
        with self.lock:
            found = list(self.retired.get(rank, ()))[-last if last else 0 :]
            sources = [s for s in list(self.sources) if s.origin.global_rank == rank]
        for source in sources:
            found += source.records(last)
        return sorted(found, key=lambda r: r.start_ns)[-CAPACITY:]


_recorder = _Recorder()
os.register_at_fork(after_in_child=_recorder.clear)


def add_source(source: RecordSource) -> None:
    """Include the records of `source` in dumps; the recorder refers to it weakly."""
    origin = source.origin
    with _recorder.lock:
        _recorder.sources.add(source)
        _recorder.dumped.pop((origin.group, origin.global_rank), None)


def retire(source: RecordSource) -> None:
    """Copy the records of `source` and drop it; an unknown source is ignored."""
    with _recorder.lock:
        if source not in _recorder.sources:
            return
        _recorder.sources.discard(source)
        origin = source.origin
        kept = _recorder.retired.setdefault(origin.global_rank, deque(maxlen=CAPACITY))
        kept.extend(source.records())
        _recorder.origins.append(origin)


def forget(source: RecordSource) -> None:
    """Drop `source` without its records: they are parts of operations of another source."""
    with _recorder.lock:
        _recorder.sources.discard(source)


def renumber(group: str, rank: int, global_ranks: tuple[int, ...]) -> None:
    """Use new global ranks, after all groups except one were destroyed.

    Records with the old ranks are dropped, and the job gets another name, because files with old
    and new ranks must not be merged.

    Args:
        group: The remaining group.
        rank: This rank's old global rank.
        global_ranks: The new global rank of each rank of the group.
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
    """Set the name of this process's job; the files of a job are written to one folder."""
    _recorder.job = name


def job() -> str:
    """Return the name of the job; empty if there is none."""
    return _recorder.job


def recording() -> bool:
    """Return whether any group of this process is being recorded."""
    with _recorder.lock:
        return len(_recorder.sources) > 0


def recorded(rank: int | None = None) -> list[Record]:
    """Return the last operations that this process has recorded, by start time.

    Args:
        rank: Only those of this global rank; None for all ranks of this process.

    Returns:
        At most 2,000 records per rank.

    Example:
        ```python
        from dure import trace

        dist.barrier()
        assert trace.recorded()[-1].op == "barrier"
        ```
    """
    ranks: Iterable[int] = _recorder.known() if rank is None else [rank]
    found = [record for r in ranks for record in _recorder.records(r)]
    return sorted(found, key=lambda r: r.start_ns)


def dump(
    directory_or_path: Path | str | None = None,
    *,
    rank: int | None = None,
    reason: str = "dump()",
) -> Path:
    """Write the last operations of this process's ranks, one JSON file per rank (`rank3.json`).

    Args:
        directory_or_path: A directory, which is created if it is missing, or a file if the name
            ends with ".json". None: DURE_TRACE_DIR, or the job's folder in the user's state
            directory.
        rank: Only this global rank; None for all ranks of this process.
        reason: The reason that is written into the file.

    Returns:
        The file; the directory if the process has several ranks (threads).

    Raises:
        OSError: The file could not be written.

    Example:
        ```python
        path = trace.dump(Path("traces"))
        assert path.name == f"rank{dist.get_rank()}.json"
        ```
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
            marks=list(_recorder.marks),
            job=_recorder.job,
            reason=reason,
        )
        for r in ranks or [-1]
    ]
    return written[0] if len(written) == 1 else written[0].parent


@contextmanager
def record_steps(directory: Path | str | None = None) -> Generator[None]:
    """Record the phases of training steps and the buckets of gradients while the block runs.

    `DistributedDataParallel`, `StepMeter`, sharded modules and pipelines emit them. `dump` writes
    the last ones along with the operations, and ``dure trace merge DIRECTORY -o timeline.json``
    draws all ranks on one timeline.

    Args:
        directory: Write one file per rank to this directory at the end of the block, also after an
            exception; None writes nothing.

    Raises:
        OSError: The file could not be written.

    Cost:
        About 2 us per phase or bucket, only inside the block.

    Example:
        ```python
        model = dist.DistributedDataParallel(torch.nn.Linear(4, 2))
        with trace.record_steps("steps"):
            model(torch.ones(3, 4)).sum().backward()
        assert Path(f"steps/rank{dist.get_rank()}.json").exists()
        ```
    """
    read_steps(True)
    try:
        yield
    finally:
        read_steps(False)
        if directory is not None:
            dump(directory, reason="record_steps()")


def read_steps(wanted: bool) -> None:
    """Add (or, if `wanted` is false, remove) a reader of spans and marks."""
    with _recorder.lock:
        if wanted and _recorder.num_readers == 0:
            _recorder.spans.start()
        _recorder.num_readers += 1 if wanted else -1
        if _recorder.num_readers == 0:
            _recorder.spans.stop()


def mark(values: Mark) -> None:
    """Record the values that the program reports for a step, if there is a reader."""
    if _recorder.num_readers:
        _recorder.marks.append(values)


def publish(folder: Path, reason: str, most: tuple[int, int, int]) -> None:
    """Write the newest records of each rank of this process.

    Args:
        folder: The folder of the files, one per rank.
        reason: The reason that is written into the files.
        most: Upper bounds: operations of each group, spans of each rank, marks. Spans and marks
            are those of the last seconds.

    Raises:
        OSError: A file could not be written.
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
            marks=_lately(list(_recorder.marks)[-marks:], lambda mark: mark.time_ns > since_ns),
            job=_recorder.job or env.text("DURE_LAUNCHER") or "",  # the world may be destroyed
            reason=reason,
        )


def _lately(found: list[T], is_new: Callable[[T], bool]) -> list[T]:
    """Return the new elements, but at least the last few: a step may take minutes."""
    num_new = sum(map(is_new, found))
    return found[-max(num_new, _AT_LEAST) :]


def on_crash(error: BaseException) -> None:
    """Dump to DURE_TRACE_DIR, if it is set, before `error` ends this rank's program. Never raises.

    Without this file, a rank that fails outside an operation (as it reads a data file, say) would
    look like a killed one.
    """
    if not env.text("DURE_TRACE_DIR") or not files.wanted() or isinstance(error, SystemExit):
        return
    with suppress(Exception):
        if _recorder.known() and not any(_recorder.dumped.values()):
            # The world may have been destroyed.
            _recorder.job = _recorder.job or env.text("DURE_LAUNCHER") or ""
            try:
                dump(reason=f"{files.CRASHED}{type(error).__name__}: {error}")
            except OSError as e:
                error.add_note(f"No flight record could be written: {e}")


def on_hang() -> None:
    """Dump to DURE_TRACE_DIR, if it is set, before the launcher ends a hang. Never raises.

    The record of a rank whose groups have failed is kept, because it names the failure.
    """
    if not env.text("DURE_TRACE_DIR") or not files.wanted():
        return
    with suppress(Exception), _recorder.lock:
        origins = [source.origin for source in list(_recorder.sources)]
        if origins and not any((o.group, o.global_rank) in _recorder.dumped for o in origins):
            dump(reason="a hang, which the launcher ends")


def on_error(error: DureError, rank: int | None = None) -> None:
    """Dump once for each group that fails because of other ranks, and add the path to `error`.

    Never raises, so that `error` itself is not hidden. Does nothing for other kinds of errors,
    or with DURE_TRACE_DIR=off.

    Args:
        error: The error that is about to be raised.
        rank: Global rank that raises it; None if the process has only one rank.
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
