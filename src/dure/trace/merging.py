"""Reads the flight records of all ranks of a job, and converts their times to one clock.

Ranks that share a host and a boot share a clock already. Times of different hosts are related by
the pair of clocks in each file, with the accuracy of the hosts' times of day.

A folder may have files that cannot be merged: damaged files, files of another kind, version or job,
two files of one rank. Each of them is reported, and the others are merged.

Memory is bounded: if there are many files, only the last records of each are kept, as if the rank's
ring had been smaller, and those that findings depend on (`_latest`). The members of equal groups of
different files are kept once.
"""

from __future__ import annotations

import errno
import re
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from dure.errors import UsageError
from dure.trace.events import State
from dure.trace.files import CRASHED, FORMAT, VERSION
from dure.trace.frames import user_frame
from dure.trace.marks import Mark
from dure.trace.plain_files import NotAFile, read_plain, release_that_reads
from dure.trace.record import Record
from dure.trace.spans import Span

_MOST_BYTES = 1 << 28  # a hundred ranks' full records
_OWN_START = b'{"format":"%s","version":%d,' % (FORMAT.encode(), VERSION)
"""How `files.write` begins a file of this version."""
_READ = (1, VERSION)
"""The versions that are read; `files` describes the difference."""
_MOST_MEMBERS = 1 << 22
"""How many members the groups of all files may have, equal groups counted once: a few bytes of a
damaged file could name more than memory has."""
_MOST_PROBLEMS = 20
_MOST_RECORDS = 1 << 18
"""How many records of all files together are kept, if there are at least `_LEAST_RECORDS` each."""
_LEAST_RECORDS = 64
_LAST_CALLS = 16
"""How many collectives of each group are kept in any case; ranks are compared by them."""
# Control characters as JSON escapes them (an escaped backslash is not one), DEL, C1 in UTF-8.
_CONTROL = re.compile(
    rb"\\\\|\\u00(?:[01][0-9a-f]|[7-9][0-9a-f])|\x7f|\xc2[\x80-\x9f]", re.IGNORECASE
)

__all__ = [
    "ClockPair",
    "Flight",
    "Limits",
    "Membership",
    "RankFile",
    "StackFrame",
    "ThreadStack",
    "read",
    "read_file",
    "read_files",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPair:
    """Two clocks, read at the same time."""

    monotonic_ns: int
    time_ns: int


_Ranges = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A group of a rank.

    Attributes:
        name: Its name.
        rank: The rank's number in it.
        ranks: The global ranks of all members.
        backend: Its backend.
        ranges: The same as `ranks` in a file, as ranges: empty after it has been read.
    """

    name: str
    rank: int
    ranks: tuple[int, ...] = ()
    backend: str = ""
    ranges: _Ranges = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One level of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """The stack of a thread when its rank wrote the file; the innermost frame is the last."""

    name: str
    main: bool
    stack: tuple[StackFrame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """The file of one rank; `files` describes the fields."""

    rank: int
    world_size: int
    host: str
    boot: str
    pid: int
    job: str
    reason: str
    clock: ClockPair
    groups: tuple[Membership, ...]
    records: tuple[Record, ...]
    threads: tuple[ThreadStack, ...] = ()
    spans: tuple[Span, ...] = ()
    marks: tuple[Mark, ...] = ()

    @property
    def failure(self) -> str:
        """The exception that ended the rank's program; empty if there was none."""
        return self.reason.removeprefix(CRASHED) if self.reason.startswith(CRASHED) else ""

    @property
    def where(self) -> StackFrame | None:
        """The innermost frame of the program in the main thread; else the innermost frame."""
        main = next((t.stack for t in self.threads if t.main), ())
        own = user_frame([frame.file for frame in reversed(main)])
        return main[-1 - (own or 0)] if main else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """The files of a job's ranks, and problems with other files of the folder.

    Attributes:
        ranks: The files by global rank.
        problems: The files that were left out, and why.
        zero_ns: The earliest start of all operations and spans, in ns since the epoch.
    """

    ranks: dict[int, RankFile]
    problems: tuple[str, ...] = ()
    zero_ns: int = 0
    _shift_ns: dict[int, int] = field(default_factory=dict[int, int])

    def time_ns(self, rank: int, monotonic_ns: int) -> int:
        """Return a time of `rank` as ns since `zero_ns`, the same for all ranks."""
        return monotonic_ns + self._shift_ns[rank] - self.zero_ns

    @property
    def absent(self) -> tuple[int, ...]:
        """Members of recorded groups that have no file."""
        lists = {id(g.ranks): g.ranks for f in self.ranks.values() for g in f.groups}
        known = {rank for ranks in lists.values() for rank in ranks}
        return tuple(sorted(known - self.ranks.keys()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for files from untrusted writers.

    Attributes:
        each_bytes: Most bytes of a file.
        all_bytes: Most bytes of all files together; None for no limit.
        accept: Returns whether a file is accepted; None accepts all.
    """

    each_bytes: int = _MOST_BYTES
    all_bytes: int | None = None
    accept: Callable[[RankFile], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    format: str = ""
    version: int = 0
    needs: str = ""


class _Unreadable(Exception):
    """The reason to leave a file out."""


def read(folder: Path) -> Flight:
    """Read the files of all ranks.

    Args:
        folder: The folder of the files `*.json`.

    Raises:
        UsageError: There is no such folder, or no flight record in it.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", fix="Name the folder of rank*.json files.")
    return read_files(sorted(folder.glob("*.json")), str(folder))


def read_files(paths: Iterable[Path], where: str, limits: Limits | None = None) -> Flight:
    """Read files of ranks.

    Args:
        paths: The files.
        where: A name for all of them, for the error if none can be read.
        limits: For files from untrusted writers.

    Raises:
        UsageError: None of them is a flight record.
    """
    limits = limits or Limits()
    found: list[tuple[Path, RankFile]] = []
    problems: list[str] = []
    left = limits.all_bytes
    paths = list(paths)
    most = max(_LEAST_RECORDS, _MOST_RECORDS // max(1, len(paths)))
    members = _Members()
    num_cut = 0
    for path in paths:
        try:
            content = _content(
                path, limits.each_bytes if left is None else min(left, limits.each_bytes)
            )
            left = None if left is None else left - len(content)
            file = members.listed(_decode(content))
            if limits.accept is not None and not limits.accept(file):
                raise _Unreadable("holds more than a rank records")
            cut = _latest(file, most)
            num_cut += cut is not file
            found.append((path, cut))
        except _Unreadable as problem:
            problems.append(f"{_printable(path.name)}: {problem}")
    if not found:
        seen = "; ".join(problems[:_MOST_PROBLEMS]) or "no *.json file"
        raise UsageError(f"there is no flight record in {_printable(where)}", seen=seen)
    kept = _one_of_each(found, problems)
    if num_cut:
        problems.append(
            f"the oldest records of {num_cut} files, because there are {len(paths)} files: some "
            f"{most} of each are compared (`dure trace show FILE` shows the others)"
        )
    return _on_one_clock(kept, tuple(problems))


def _latest(file: RankFile, most: int) -> RankFile:
    """Return a file without most of the old records, if it has more than `most`.

    Kept are the last records, the first failed one, and of each group the last collectives: a rank
    whose last collective was dropped would seem to have never called it.
    """
    if max(len(file.records), len(file.spans), len(file.marks)) <= most:
        return file
    records = file.records
    kept = set(range(max(0, len(records) - most), len(records)))
    of_group: dict[str, deque[int]] = {}
    for index, record in enumerate(records):
        if not record.is_message:
            of_group.setdefault(record.group, deque(maxlen=_LAST_CALLS)).append(index)
    kept.update(*of_group.values())
    failed = (index for index, record in enumerate(records) if record.state is State.FAILED)
    kept.update(list(failed)[:1])
    return replace(
        file,
        records=tuple(records[index] for index in sorted(kept)),
        spans=file.spans[-most:],
        marks=file.marks[-most:],
    )


class _Members:
    """The members of the groups of all files; those of equal groups are one object."""

    def __init__(self) -> None:
        self._lists: dict[tuple[int, ...] | _Ranges, tuple[int, ...]] = {}
        self._num = 0

    def listed(self, file: RankFile) -> RankFile:
        """Return a file whose groups list their members.

        Raises:
            _Unreadable: Members are not ranks, or there are too many of them.
        """
        groups = (replace(group, ranks=self._of(group), ranges=()) for group in file.groups)
        return replace(file, groups=tuple(groups))

    def _of(self, group: Membership) -> tuple[int, ...]:
        key = group.ranges or group.ranks
        known = self._lists.get(key)
        if known is None:
            for first, number, step in group.ranges:
                if number < 1 or min(first, first + (number - 1) * step) < 0:
                    raise _Unreadable(f"is damaged (members of group {_printable(group.name)!r})")
            self._num += sum(number for _, number, _ in group.ranges) or len(group.ranks)
            if self._num > _MOST_MEMBERS:
                raise _Unreadable(f"has groups of too many ranks: over {_MOST_MEMBERS:,} in all")
            known = group.ranks or tuple(
                first + i * step for first, number, step in group.ranges for i in range(number)
            )
            self._lists[key] = known
        return known


def read_file(path: Path) -> RankFile:
    """Read the file of one rank.

    Raises:
        UsageError: It cannot be read, or is not a flight record.
    """
    try:
        return _Members().listed(_decode(_content(path, _MOST_BYTES)))
    except _Unreadable as problem:
        raise UsageError(
            f"{path} cannot be shown",
            seen=str(problem),
            fix="Name the flight record of a rank (rank*.json).",
        ) from None


def _decode(content: bytes) -> RankFile:
    if content.startswith(_OWN_START):  # the common case: one pass
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(content, type=RankFile)
    try:
        header = msgspec.json.decode(content, type=_Header)
    except (msgspec.ValidationError, RecursionError):
        raise _Unreadable("is not a flight record") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _Unreadable("is not JSON, or incomplete") from None
    if header.format != FORMAT:
        raise _Unreadable("is not a flight record")
    if header.version not in _READ:
        seen = f"is of format {header.version}, and this release of Dure reads {VERSION}"
        older = header.version < VERSION
        raise _Unreadable(f"{seen}: install {release_that_reads(header.needs, older=older)}")
    try:
        return msgspec.json.decode(content, type=RankFile)
    except msgspec.ValidationError as error:
        raise _Unreadable(f"is damaged ({error})") from None


def _content(path: Path, most_bytes: int) -> bytes:
    """Read a file, with control characters escaped so that a terminal only displays them."""
    try:
        content = read_plain(path, most_bytes)
    except OSError as error:
        seen = str(error.strerror)
        own = isinstance(error, NotAFile) or error.errno == errno.EFBIG
        raise _Unreadable(seen if own else f"cannot be read ({seen})") from None
    return _CONTROL.sub(_visible, content)


def _visible(found: re.Match[bytes]) -> bytes:
    """Return the escape for a control character."""
    text = found[0]
    if text == b"\\\\":
        return text
    return b"\\" + text if text.startswith(b"\\") else b"\\\\u%04x" % text[-1]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def _one_of_each(found: list[tuple[Path, RankFile]], problems: list[str]) -> dict[int, RankFile]:
    """Keep the newest file of each rank, of the job whose file is the newest."""
    found.sort(key=lambda item: item[1].clock.time_ns, reverse=True)
    job = found[0][1].job
    kept: dict[int, RankFile] = {}
    for path, file in found:
        if file.job != job:
            problems.append(
                f"{_printable(path.name)}: is of another job, {file.job!r} and not {job!r}"
            )
        elif file.rank in kept:
            problems.append(f"{_printable(path.name)}: is an older file of rank {file.rank}")
        else:
            kept[file.rank] = file
    return dict(sorted(kept.items()))


def _on_one_clock(files: dict[int, RankFile], problems: tuple[str, ...]) -> Flight:
    shift_of_boot: dict[str, int] = {}
    shifts: dict[int, int] = {}
    for rank, file in files.items():
        shift = file.clock.time_ns - file.clock.monotonic_ns
        shifts[rank] = shift_of_boot.setdefault(file.boot, shift) if file.boot else shift
    starts: Iterable[int] = (
        r.start_ns + shifts[n] for n, f in files.items() for r in (*f.records, *f.spans)
    )
    dumped = min(f.clock.monotonic_ns + shifts[n] for n, f in files.items())
    zero = min(starts, default=dumped)
    return Flight(ranks=files, problems=problems, zero_ns=zero, _shift_ns=shifts)
