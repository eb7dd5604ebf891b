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
three files: `events.node1.jsonl`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dure.launch.ranks.environment import Round, rank_log_dir
from dure.launch.show.files import directory_below, open_in
from dure.launch.spec import JobResult, JobSpec, RankResult, Std, Stream, StreamChoice

__all__ = ["Journal", "RankLogs", "is_kept", "is_shown"]

_OURS_ALONE = 0o700  # of a directory that is made here: programs print what not everybody may read
_STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")


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
    """Whether a rank's stream goes to the terminal."""
    if spec.local_ranks_filter is not None and local_rank not in spec.local_ranks_filter:
        return False
    if _choice(spec.tee, local_rank).has(stream):
        return True
    return not _choice(spec.redirects, local_rank).has(stream)


class RankLogs:
    """The files that hold each rank's output as it came.

    Args:
        spec: The job: what is kept, and where.
        round: Which start of it.

    Attributes:
        trouble: Why nothing is kept any more, if the files could not be written (a full disk).

    Raises:
        OSError: The files cannot be made.
    """

    def __init__(self, spec: JobSpec, round: Round) -> None:
        self.trouble: OSError | None = None
        self._files: dict[tuple[int, Stream], IO[bytes]] = {}
        self._filtered: dict[Stream, tuple[tuple[bytes, ...], IO[bytes]]] = {}
        try:
            for local_rank in range(round.nproc):
                if spec.log_dir is not None:  # for the error file, at least
                    self._open(spec, round, local_rank)
            self._open_filtered(spec, round)
        except OSError:
            self.close()
            raise

    def write(self, rank: int, stream: Stream, data: bytes) -> None:
        """Keep what came from a rank."""
        file = self._files.get((rank, stream))
        if file is not None:
            self._write(file, data)

    def lines(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        """Collect those lines of a rank that hold a word the user looks for."""
        words, file = self._filtered.get(stream, ((), None))
        if file is not None:
            found = [line for line in lines if any(word in line for word in words)]
            self._write(file, b"".join(b"[%d] %s\n" % (rank, line) for line in found))

    def _write(self, file: IO[bytes], data: bytes) -> None:
        """Write everything; a disk that is full ends the keeping, not the job."""
        left = memoryview(data)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            self.trouble = error
            self.close()

    def close(self) -> None:
        """Close the files."""
        for file in (*self._files.values(), *(file for _, file in self._filtered.values())):
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()
        self._filtered.clear()

    def _open_filtered(self, spec: JobSpec, round: Round) -> None:
        chosen: dict[Stream, tuple[str, ...]] = {
            "stdout": spec.stdout_filters,
            "stderr": spec.stderr_filters,
        }
        for stream, words in chosen.items():
            if spec.log_dir is not None and words:
                mark = f".node{round.node}" if round.node else ""
                path = spec.log_dir / f"attempt_{round.number}" / f"filtered_{stream}{mark}.log"
                with directory_below(spec.log_dir, path.parent.name) as directory:
                    file = os.fdopen(open_in(directory, path), "wb", buffering=0)
                self._filtered[stream] = (tuple(os.fsencode(word) for word in words), file)

    def _open(self, spec: JobSpec, round: Round, local_rank: int) -> None:
        """Make a rank's directory, and open what is kept of it."""
        assert spec.log_dir is not None
        spec.log_dir.mkdir(parents=True, exist_ok=True, mode=_OURS_ALONE)
        rank = round.rank(local_rank)
        path = rank_log_dir(spec.log_dir, rank, round.number)
        with directory_below(spec.log_dir, path.parent.name, path.name) as directory:
            with contextlib.suppress(FileNotFoundError):
                os.unlink("error.json", dir_fd=directory)  # of an earlier job
            for stream in _STREAMS:
                if is_kept(spec, local_rank, stream):
                    fd = open_in(directory, path / f"{stream}.log")
                    self._files[rank, stream] = os.fdopen(fd, "wb", buffering=0)


def _seconds(seconds: float) -> float:
    """Return a time to the microsecond, as a person reads it."""
    return round(seconds, 6)


def _plain(rank: RankResult) -> dict[str, object]:
    """Return what JSON can hold of a rank's result."""
    content: dict[str, object] = {**dataclasses.asdict(rank), "status": rank.status}
    content["stack"] = [str(frame) for frame in rank.stack]
    return content


class Journal:
    """What happened to the job, for machines: `events.jsonl`, `job.json` and `launcher.log`.

    Args:
        directory: Where they lie; None: nothing is written.
        node: This host's number.

    Attributes:
        trouble: Why something could not be written, once that has happened (a full disk).

    Raises:
        OSError: The directory cannot be written.
    """

    def __init__(self, directory: Path | None, node: int = 0) -> None:
        self.trouble: OSError | None = None
        self._directory = directory
        self._mark = f".node{node}" if node else ""
        self._events: IO[str] | None = None
        self._said: IO[str] | None = None
        self._job: dict[str, object] = {}
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True, mode=_OURS_ALONE)
            try:
                self._open(directory)
            except OSError:
                self.close()
                raise

    def _open(self, directory: Path) -> None:
        events, said = f"events{self._mark}.jsonl", f"launcher{self._mark}.log"
        with directory_below(directory) as opened:
            self._events = os.fdopen(open_in(opened, directory / events), "w", buffering=1)
            fd = open_in(opened, directory / said)
        self._said = os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace")

    def note(self, event: str, **fields: object) -> None:
        """Append one event, with the time of day in seconds."""
        if self._events is not None:
            content = {"time": _seconds(time.time()), "event": event} | fields
            with self._goes_on():
                self._events.write(json.dumps(content) + "\n")

    def said(self, text: str) -> None:
        """Keep what the launcher said to the user."""
        if self._said is not None:
            with self._goes_on():
                self._said.write(text + "\n")

    def began(self, spec: JobSpec, round: Round) -> None:
        """Keep what was started."""
        at = {"number": round.number, "node": round.node}
        self.note("round", **at, hosts=round.hosts, nprocs=round.nprocs)
        self._job |= {
            "program": [spec.program, *spec.args],
            "kind": spec.kind,
            "run_id": spec.run_id,
            "directory": str(Path.cwd()),
            "rounds": round.number + 1,
            "hosts": round.hosts,
            "nprocs": round.nprocs,
            "state": "running",
        }
        self._write_job()

    def conclude(self, result: JobResult) -> None:
        """Keep what came of the job."""
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
        if self._directory is not None:
            with self._goes_on():
                path = self._directory / f"job{self._mark}.json"
                fresh = path.with_suffix(".json.part")
                with directory_below(self._directory) as directory:
                    with os.fdopen(open_in(directory, fresh), "w") as file:
                        file.write(json.dumps(self._job, indent=1) + "\n")
                    os.replace(fresh.name, path.name, src_dir_fd=directory, dst_dir_fd=directory)

    @contextlib.contextmanager
    def _goes_on(self) -> Iterator[None]:
        """Remember what cannot be written: a full disk must not end the job."""
        try:
            yield
        except OSError as error:
            self.trouble = error

    def close(self) -> None:
        """Close the files."""
        for file in (self._events, self._said):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._events = self._said = None
