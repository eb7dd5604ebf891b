"""Where the ranks' output goes: to the terminal or to a function, and to files if asked for."""

from __future__ import annotations

import contextlib
from typing import IO

from dure.launch.environment import rank_log_dir
from dure.launch.output import IDLE_S, LineReader, Piece, Sink, same_file
from dure.launch.spec import JobSpec, Line, Stream

__all__ = ["Terminal"]


class Terminal:
    """Shows the output of all ranks of a job.

    Args:
        spec: The job: where its lines go, and whether they are kept.

    Raises:
        OSError: The log files cannot be made.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        out = Sink(1, spec.nproc)
        errors = out if same_file(1, 2) else Sink(2, spec.nproc)
        self._sinks: dict[Stream, Sink] = {"stdout": out, "stderr": errors}
        self._readers: list[LineReader] = []
        self._logs: dict[tuple[int, Stream], IO[bytes]] = {}
        if spec.log_dir is not None:
            self._open_logs()

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """The distinct places that are written to."""
        return tuple({id(sink): sink for sink in self._sinks.values()}.values())

    @property
    def full(self) -> bool:
        """Whether the ranks must wait until more has been taken."""
        return any(sink.full for sink in self.sinks)

    @property
    def broken(self) -> bool:
        """Whether nobody reads the standard output any more."""
        return self._sinks["stdout"].broken

    @property
    def wake_at(self) -> float | None:
        """When `tick` has an unfinished line to show."""
        held = [reader.last_at for reader in self._readers if reader.holds]
        return min(held) + IDLE_S if held and self._spec.on_line is None else None

    def reader(self, rank: int, stream: Stream) -> LineReader:
        """Return the reader for one pipe."""
        reader = LineReader(rank, stream)
        self._readers.append(reader)
        return reader

    def received(self, reader: LineReader, data: bytes, now: float) -> None:
        """Show what a pipe brought."""
        log = self._logs.get((reader.rank, reader.stream))
        if log is not None:
            log.write(data)
        self._show(reader, reader.feed(data, now))

    def tick(self, now: float) -> None:
        """Show unfinished lines that have not grown for a while."""
        if self._spec.on_line is not None:
            return
        for reader in self._readers:
            if reader.holds and now >= reader.last_at + IDLE_S:
                self._show(reader, reader.flush())

    def say(self, text: str) -> None:
        """Show a line of the launcher's own."""
        if not self._spec.quiet:
            self._sinks["stderr"].say(f"[dure] {text}")
            self._sinks["stderr"].write_some()

    def finish(self) -> None:
        """Show what is left of unfinished lines, and close the files."""
        for reader in self._readers:
            self._show(reader, reader.flush())
        for sink in self.sinks:
            sink.finish()
        self._close_logs()

    def _show(self, reader: LineReader, pieces: list[Piece]) -> None:
        if not pieces:
            return
        if self._spec.on_line is not None:
            for piece in pieces:
                self._spec.on_line(Line(reader.rank, reader.stream, piece.text))
            return
        sink = self._sinks[reader.stream]
        sink.put(reader, reader.rank, pieces)
        sink.write_some()

    def _open_logs(self) -> None:
        assert self._spec.log_dir is not None
        try:
            for rank in range(self._spec.nproc):
                directory = rank_log_dir(self._spec.log_dir, rank)
                directory.mkdir(parents=True, exist_ok=True)
                for stream in self._sinks:
                    path = directory / f"{stream}.log"
                    self._logs[rank, stream] = path.open("wb", buffering=0)
        except OSError:
            self._close_logs()
            raise

    def _close_logs(self) -> None:
        for log in self._logs.values():
            with contextlib.suppress(OSError):
                log.close()
        self._logs.clear()
