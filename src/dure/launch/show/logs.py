"""What is kept of a job on disk, below `JobSpec.log_dir`.

    LOG_DIR/
        job.json                        what was started, and the result
        events.jsonl                    what happened, one JSON object per line
        launcher.log                    what the launcher printed
        attempt_0/rank_1/error.json     how it failed, if it did (`dure.errorfile`)
        attempt_0/filtered_stdout.log   lines of all ranks with a given word
        attempt_0/rank_1/stdout.log     what rank 1 wrote, as it came, in the first round
        attempt_0/rank_1/stdout.log.1   what it wrote before, if a size limit was requested
        attempt_1/...                   the same after the first restart

Where several hosts share the directory, all but the first add their number to the names of the
three files: `events.node1.jsonl`. Nothing here reads these files; `version` in job.json and in the
event "round" is for programs that do. It grows if a field gets another meaning or is removed.

Directories are made for the user alone. A log directory that every user of the machine may write to
is refused (`program.check_output`), because others could put links in place of the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path

from dure.launch.ranks.environment import Round
from dure.launch.spec import JobResult, JobSpec, RankResult, Std, Stream, StreamChoice

__all__ = ["VERSION", "Logs", "is_kept", "is_shown"]

VERSION = 1
"""Of job.json and the events."""

_OURS_ALONE = 0o700  # ranks print what not every user may read
_STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")


def _choice(choice: StreamChoice, local_rank: int) -> Std:
    return choice if isinstance(choice, Std) else choice.get(local_rank, Std.NONE)


def is_kept(spec: JobSpec, local_rank: int, stream: Stream) -> bool:
    """Whether a rank's stream is kept in a file: all are, unless some were chosen."""
    if spec.log_dir is None:
        return False
    if spec.redirects == Std.NONE and spec.tee == Std.NONE:
        return True
    chosen = _choice(spec.redirects, local_rank) | _choice(spec.tee, local_rank)
    return chosen.has(stream)


def is_shown(spec: JobSpec, local_rank: int, stream: Stream) -> bool:
    """Whether a rank's stream is shown."""
    if spec.local_ranks_filter is not None and local_rank not in spec.local_ranks_filter:
        return False
    if _choice(spec.tee, local_rank).has(stream):
        return True
    return not _choice(spec.redirects, local_rank).has(stream)


class LogFile:
    """A file that is written from its start, and replaced when it has a given size.

    The earlier files are called `PATH.1` (the latest), `PATH.2` and so on. A chunk of output is not
    divided, so a file may be smaller than the limit, and a chunk that is larger has its own file.

    Args:
        path: The file.
        max_bytes: The size limit; None: no limit.
        keep: How many earlier files to keep.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int | None = None, keep: int = 0) -> None:
        self._path, self._max_bytes, self._keep = path, max_bytes, keep
        self._size = 0
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by `close`)

    def write(self, data: bytes) -> None:
        """Write all of `data`.

        Raises:
            OSError: It cannot be written.
        """
        if self._max_bytes is not None and 0 < self._size > self._max_bytes - len(data):
            self._rotate()
        self._size += len(data)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _rotate(self) -> None:
        self.close()
        for number in range(self._keep, 0, -1):
            newer = self._earlier(number - 1)
            with contextlib.suppress(FileNotFoundError):
                newer.replace(self._earlier(number))
        self._file, self._size = open(self._path, "wb", buffering=0), 0  # noqa: SIM115

    def _earlier(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path


class Logs:
    """The files of a job. Without a directory (`JobSpec.log_dir`) nothing is kept.

    Attributes:
        trouble: Why something could not be written, once that has happened. A full disk ends the
            logs, not the job.

    Raises:
        OSError: The directory cannot be made.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.trouble: OSError | None = None
        self._spec = spec
        self._mark = ""
        self._outputs: dict[tuple[int, Stream], LogFile] = {}
        self._filtered: dict[Stream, LogFile] = {}
        self._words = {"stdout": spec.stdout_filters, "stderr": spec.stderr_filters}
        self._job: dict[str, object] = {}
        self._events: LogFile | None = None
        self._printed: LogFile | None = None
        self._event_log = None if spec.event_log is None else LogFile(spec.event_log)
        self._early = b""  # printed before this host had a number
        if spec.log_dir is not None:
            spec.log_dir.mkdir(parents=True, exist_ok=True, mode=_OURS_ALONE)

    def begin(self, this_round: Round) -> None:
        """Keep what was started, and make the files of a round.

        Raises:
            OSError: They cannot be made, in the first round.
        """
        self._close_outputs()
        at = {"number": this_round.number, "node": this_round.node}
        about = {**at, "hosts": this_round.hosts, "nprocs": this_round.nprocs}
        top = self._spec.log_dir
        if top is None:
            self.note("round", version=VERSION, **about)
            return
        try:
            if self._printed is None:
                self._mark = f".node{this_round.node}" if this_round.node else ""
                self._events = LogFile(top / f"events{self._mark}.jsonl")
                self._printed = LogFile(top / f"launcher{self._mark}.log")
                self._write(self._printed, self._early)
            self._open_outputs(top / f"attempt_{this_round.number}", this_round)
        except OSError as error:
            if this_round.number == 0:
                raise
            self._fail(error)
        self.note("round", version=VERSION, **about)
        self._job |= {
            "format": "dure job",
            "version": VERSION,
            "program": [self._spec.program, *self._spec.args],
            "kind": self._spec.kind,
            "run_id": self._spec.run_id,
            "directory": str(Path.cwd()),
            "rounds": this_round.number + 1,
            "hosts": this_round.hosts,
            "nprocs": this_round.nprocs,
            "state": "running",
        }
        self._write_job()

    def _open_outputs(self, attempt: Path, this_round: Round) -> None:
        spec = self._spec
        for local_rank in range(this_round.nproc):
            rank = this_round.rank(local_rank)
            directory = attempt / f"rank_{rank}"
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "error.json").unlink(missing_ok=True)  # of an earlier job
            for stream in _STREAMS:
                if is_kept(spec, local_rank, stream):
                    self._outputs[rank, stream] = self._log(directory / f"{stream}.log")
        for stream in _STREAMS:
            if self._words[stream]:
                path = attempt / f"filtered_{stream}{self._mark}.log"
                self._filtered[stream] = self._log(path)

    def _log(self, path: Path) -> LogFile:
        return LogFile(path, self._spec.log_max_bytes, self._spec.log_keep)

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Keep what a rank wrote."""
        self._write(self._outputs.get((rank, stream)), data)

    def lines(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        """Keep the lines of a rank that contain a word the user looks for."""
        if stream in self._filtered:
            words = [os.fsencode(word) for word in self._words[stream]]
            found = [line for line in lines if any(word in line for word in words)]
            text = b"".join(b"[%d] %s\n" % (rank, line) for line in found)
            self._write(self._filtered[stream], text)

    def note(self, event: str, **fields: object) -> None:
        """Append one event, with the time in seconds since 1970, and show it to the user's hook."""
        content = {"time": _seconds(time.time()), "event": event} | fields
        if self._spec.on_event is not None:
            self._spec.on_event(content)
        line = json.dumps(content).encode() + b"\n"
        self._write(self._events, line)
        self._write(self._event_log, line)

    def said(self, text: str) -> None:
        """Keep a line of the launcher."""
        line = text.encode(errors="backslashreplace") + b"\n"
        if self._printed is None:
            self._early += line
        self._write(self._printed, line)

    def conclude(self, result: JobResult) -> None:
        """Keep the result of the job."""
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
            fresh.write_bytes(json.dumps(self._job, indent=1).encode() + b"\n")
            fresh.replace(path)
        except OSError as error:
            self.trouble = error

    def _write(self, file: LogFile | None, data: bytes) -> None:
        if file is None or not data:
            return
        try:
            file.write(data)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Keep no more of the ranks' output."""
        self.trouble = error
        self._close_outputs()

    def _close_outputs(self) -> None:
        for file in (*self._outputs.values(), *self._filtered.values()):
            file.close()
        self._outputs.clear()
        self._filtered.clear()

    def close(self) -> None:
        """Close all files."""
        self._close_outputs()
        for file in (self._events, self._printed, self._event_log):
            if file is not None:
                file.close()
        self._events = self._printed = self._event_log = None


def _seconds(seconds: float) -> float:
    return round(seconds, 6)


def _plain(rank: RankResult) -> dict[str, object]:
    """Return what JSON can hold of a rank's result."""
    content: dict[str, object] = {**dataclasses.asdict(rank), "status": rank.status}
    content["stack"] = [str(frame) for frame in rank.stack]
    return content
