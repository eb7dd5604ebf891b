"""What is kept of a job on disk, below `JobSpec.log_dir`.

    LOG_DIR/
        job.json                        what was started, and what came of it
        events.jsonl                    what happened, a JSON object a line
        launcher.log                    what the launcher said
        attempt_0/rank_1/error.json     how it failed, if it did (`dure.errorfile`)
        attempt_0/filtered_stdout.log   lines of all ranks with a word the user looks for
        attempt_0/rank_1/stdout.log     what rank 1 wrote, as it came, in the first round
        attempt_1/...                   the same after the first restart

Where several hosts share the directory, all but the first add their number to the names of the
three files: `events.node1.jsonl`. Nothing here reads these files; `version` in job.json and in the
event "round" is for programs that do. It grows if a field gets another meaning or is left out.

Others may write to such a directory, as to one in a shared place. Who may can put a symbolic link
where a file of ours will be, and have us overwrite whatever it points to; or a pipe, and have us
wait for ever. So below the directory that the user has named, each step is taken from the last
one's descriptor and follows no link, and what is opened is looked at before it is changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dure.launch.ranks.environment import Round
from dure.launch.spec import JobResult, JobSpec, RankResult, Std, Stream, StreamChoice

__all__ = ["VERSION", "Logs", "is_kept", "is_shown"]

VERSION = 1
"""Of job.json and the events."""

_OURS_ALONE = 0o700  # of a directory that is made here: programs print what not everybody may read
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_IN_THE_WAY = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR)


def _choice(choice: StreamChoice, local_rank: int) -> Std:
    return choice if isinstance(choice, Std) else choice.get(local_rank, Std.NONE)


def is_kept(spec: JobSpec, local_rank: int, stream: Stream) -> bool:
    """Whether a rank's stream goes to a file: all do, unless some were chosen."""
    if spec.log_dir is None:
        return False
    if spec.redirects == Std.NONE and spec.tee == Std.NONE:
        return True
    chosen = _choice(spec.redirects, local_rank) | _choice(spec.tee, local_rank)
    return chosen.has(stream)


def is_shown(spec: JobSpec, local_rank: int, stream: Stream) -> bool:
    if spec.local_ranks_filter is not None and local_rank not in spec.local_ranks_filter:
        return False
    if _choice(spec.tee, local_rank).has(stream):
        return True
    return not _choice(spec.redirects, local_rank).has(stream)


class Logs:
    """The files of a job. Without a directory (`JobSpec.log_dir`) nothing is kept.

    Attributes:
        trouble: Why something could not be written, once that has happened: a disk that is full
            ends the keeping, not the job.

    Raises:
        OSError: The directory cannot be written.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.trouble: OSError | None = None
        self._spec = spec
        self._mark = ""
        self._outputs: dict[tuple[int, Stream], IO[bytes]] = {}
        self._filtered: dict[Stream, IO[bytes]] = {}
        self._words = {"stdout": spec.stdout_filters, "stderr": spec.stderr_filters}
        self._job: dict[str, object] = {}
        self._events: IO[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._early = b""  # said before this host had a number
        if spec.log_dir is not None:
            spec.log_dir.mkdir(parents=True, exist_ok=True, mode=_OURS_ALONE)

    def begin(self, round: Round) -> None:
        """Keep what was started, and make the files of a round.

        Raises:
            OSError: They cannot be made, in the first round.
        """
        self._close_outputs()
        if self._spec.log_dir is None:
            return
        try:
            if self._said is None:
                self._open_journal(self._spec.log_dir, round.node)
            for local_rank in range(round.nproc):
                self._open_rank(self._spec.log_dir, round, local_rank)
            self._open_filtered(self._spec.log_dir, round)
        except OSError as error:
            if round.number == 0:
                raise
            self._fail(error)
        at = {"number": round.number, "node": round.node}
        self.note("round", version=VERSION, **at, hosts=round.hosts, nprocs=round.nprocs)
        self._job |= {
            "format": "dure job",
            "version": VERSION,
            "program": [self._spec.program, *self._spec.args],
            "kind": self._spec.kind,
            "run_id": self._spec.run_id,
            "directory": str(Path.cwd()),
            "rounds": round.number + 1,
            "hosts": round.hosts,
            "nprocs": round.nprocs,
            "state": "running",
        }
        self._write_job()

    def _open_journal(self, top: Path, node: int) -> None:
        self._mark = f".node{node}" if node else ""
        with _below(top) as directory:
            self._events = _open(directory, top / f"events{self._mark}.jsonl")
            self._said = _open(directory, top / f"launcher{self._mark}.log")
        self._write(self._said, self._early)

    def _open_rank(self, top: Path, round: Round, local_rank: int) -> None:
        rank = round.rank(local_rank)
        path = top / f"attempt_{round.number}" / f"rank_{rank}"
        with _below(top, path.parent.name, path.name) as directory:
            with contextlib.suppress(FileNotFoundError):
                os.unlink("error.json", dir_fd=directory)  # of an earlier job
            streams: tuple[Stream, Stream] = ("stdout", "stderr")
            for stream in streams:
                if is_kept(self._spec, local_rank, stream):
                    self._outputs[rank, stream] = _open(directory, path / f"{stream}.log")

    def _open_filtered(self, top: Path, round: Round) -> None:
        streams: tuple[Stream, Stream] = ("stdout", "stderr")
        for stream in streams:
            if self._words[stream]:
                mark = f".node{round.node}" if round.node else ""
                path = top / f"attempt_{round.number}" / f"filtered_{stream}{mark}.log"
                with _below(top, path.parent.name) as directory:
                    self._filtered[stream] = _open(directory, path)

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        self._write(self._outputs.get((rank, stream)), data)

    def lines(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        """Collect those lines of a rank that hold a word the user looks for."""
        if stream in self._filtered:
            words = [os.fsencode(word) for word in self._words[stream]]
            found = [line for line in lines if any(word in line for word in words)]
            text = b"".join(b"[%d] %s\n" % (rank, line) for line in found)
            self._write(self._filtered[stream], text)

    def note(self, event: str, **fields: object) -> None:
        """Append one event, with the time of day in seconds."""
        content = {"time": _seconds(time.time()), "event": event} | fields
        self._write(self._events, json.dumps(content).encode() + b"\n")

    def said(self, text: str) -> None:
        line = text.encode(errors="backslashreplace") + b"\n"
        if self._said is None:
            self._early += line
        self._write(self._said, line)

    def conclude(self, result: JobResult) -> None:
        failure = result.first_failure
        self._job |= {
            "state": "succeeded" if result.ok else "failed",
            "exit_code": result.exit_code,
            "elapsed_s": _seconds(result.elapsed_s),
            "interrupted_by": result.interrupted_by,
            "first_failure": None if failure is None else _plain(failure),
            "ranks": [_plain(rank) for rank in result.ranks],
        }
        self._write_job()
        first = None if failure is None else failure.rank
        self.note("job ended", exit_code=result.exit_code, first_failure=first)

    def _write_job(self) -> None:
        top = self._spec.log_dir
        if top is None:
            return
        path = top / f"job{self._mark}.json"
        fresh = path.with_suffix(".json.part")
        try:
            with _below(top) as directory:
                with _open(directory, fresh) as file:
                    file.write(json.dumps(self._job, indent=1).encode() + b"\n")
                os.replace(fresh.name, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            self.trouble = error

    def _write(self, file: IO[bytes] | None, data: bytes) -> None:
        left = memoryview(data)
        try:
            while file is not None and left:
                left = left[file.write(left) :]
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Keep no more of the ranks' output."""
        self.trouble = error
        self._close_outputs()

    def _close_outputs(self) -> None:
        for file in (*self._outputs.values(), *self._filtered.values()):
            with contextlib.suppress(OSError):
                file.close()
        self._outputs.clear()
        self._filtered.clear()

    def close(self) -> None:
        self._close_outputs()
        for file in (self._events, self._said):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._events = self._said = None


def _seconds(seconds: float) -> float:
    return round(seconds, 6)


def _plain(rank: RankResult) -> dict[str, object]:
    """Return what JSON can hold of a rank's result."""
    content: dict[str, object] = {**dataclasses.asdict(rank), "status": rank.status}
    content["stack"] = [str(frame) for frame in rank.stack]
    return content


@contextlib.contextmanager
def _below(top: Path, *names: str) -> Iterator[int]:
    """Open a directory below `top`, made where it is missing, and yield its descriptor."""
    with contextlib.ExitStack() as opened:
        fd, path = os.open(top, _DIRECTORY), top
        opened.callback(os.close, fd)
        for name in names:
            path /= name
            with _named(path):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=fd)
                fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            opened.callback(os.close, fd)
        yield fd


def _open(directory: int, path: Path) -> IO[bytes]:
    """Open a regular file of this directory to write it anew."""
    with _named(path):
        file = os.fdopen(os.open(path.name, _FILE, 0o666, dir_fd=directory), "wb", buffering=0)
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.ENXIO, "")
            file.truncate(0)
        except OSError:
            file.close()
            raise
    return file


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error say which file it is about, and what is in its way."""
    try:
        yield
    except OSError as error:
        text = error.strerror
        if error.errno in _IN_THE_WAY:
            text = "a link, or something else that is not ours, has its name; remove it"
        raise OSError(error.errno, text, str(path)) from None
