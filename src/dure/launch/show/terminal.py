"""Where the ranks' output goes: to the terminal or to a function, and to files if asked for.

A rank's bytes take this way: pipe, log file (as they are), `LineReader` (lines), `Folder` (lines
that several ranks wrote alike, once), `Sink` (with a prefix, to the terminal). A function that was
asked for (`JobSpec.on_line`) gets every line in place of the last two.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque

from dure import env
from dure.launch.ranks.environment import Round
from dure.launch.ranks.report import Step
from dure.launch.ranks.spawn import RankProcess
from dure.launch.show.folding import WINDOW_S, Entry, Folder, Prefixes, Tracebacks
from dure.launch.show.live import Rows
from dure.launch.show.logs import Logs, is_shown
from dure.launch.show.output import LineReader, Sink, same_file
from dure.launch.spec import Crash, Exit, JobResult, JobSpec, Line, Stream

__all__ = ["Terminal"]

_SEEN = 200
_SEEN_BYTES = 1 << 13  # of each of these lines


class Terminal:
    """Shows the output of all ranks of a job on this host.

    Raises:
        OSError: The files cannot be made.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        out = Sink(1)
        errors = out if same_file(1, 2) else Sink(2)
        self._sinks: dict[Stream, Sink] = {"stdout": out, "stderr": errors}
        self.sinks = (out,) if out is errors else (out, errors)  # the places that are written to
        self._readers: list[LineReader] = []
        self._folders = {sink.fd: Folder([0]) for sink in self.sinks}
        self._colour = {sink.fd: sink.terminal and not env.text("NO_COLOR") for sink in self.sinks}
        self._prefixes = Prefixes(0, spec.nproc)
        self._first_rank = 0
        self._seen: dict[int, deque[bytes]] = {}  # a rank's last lines of errors
        self._tracebacks = Tracebacks()
        self._begun: set[LineReader] = set()  # whose line was shown in part
        self._live = spec.live and spec.on_line is None and out.terminal
        looked_at = self._live or spec.watcher is not None
        self._rows = Rows(" ".join((spec.program, *spec.args))) if looked_at else None
        self._warned = False
        self._logs = Logs(spec)

    @property
    def full(self) -> bool:
        """Whether the ranks must wait until more has been taken."""
        return any(sink.full for sink in self.sinks)

    @property
    def broken(self) -> bool:
        """Whether nobody reads the standard output any more."""
        return self._sinks["stdout"].broken

    @property
    def unread(self) -> bool:
        """Whether a broken standard output is one that nobody reads, and not a full disk."""
        trouble = self._sinks["stdout"].trouble
        return trouble is None or trouble.errno == errno.EPIPE

    @property
    def why_broken(self) -> str:
        """Why nothing is written to the standard output any more."""
        trouble = self._sinks["stdout"].trouble
        if trouble is None or self.unread:
            return "nobody reads the output any more"
        return f"the output cannot be written: {trouble.strerror}"

    @property
    def wake_at(self) -> float | None:
        if self._spec.on_line is not None:
            return None
        held = [reader.show_at for reader in self._readers if self._may_show_part(reader)]
        held += [self._rows.draw_at] if self._rows is not None else []
        held += [f.wake_at for f in self._folders.values() if f.wake_at is not None]
        return min(held, default=None)

    def begin(self, round: Round) -> None:
        """Start on a round of the job: its ranks, their number and files.

        Raises:
            OSError: The log files of the first round cannot be made.
        """
        self._flush()
        self._readers.clear()
        self._begun.clear()
        self._tracebacks = Tracebacks()
        self._first_rank = round.first_rank
        spec, several = self._spec, round.num_hosts > 1
        with_host = spec.prefix == "host" or (spec.prefix == "auto" and several)
        host = round.host if with_host else None
        shown = spec.prefix != "none"
        self._prefixes = Prefixes(round.first_rank, round.world_size, host, shown)
        for stream, sink in self._sinks.items():
            ranks = [r for r in range(round.nproc) if is_shown(spec, r, stream)]
            self._folders[sink.fd] = Folder(ranks, WINDOW_S if spec.fold else 0.0)
        self._logs.begin(round)
        self._warn()

    def started(self, process: RankProcess) -> None:
        rank, pid = process.rank, process.pid
        self._logs.note("started", rank=rank, pid=pid, host=process.host)
        if self._rows is not None:
            self._rows.started(rank, pid, process.host)

    def ended(self, process: RankProcess, exit: Exit) -> None:
        rank, pid = process.rank, process.pid
        self._logs.note("ended", rank=rank, pid=pid, code=exit.code, signal=exit.signal)
        self._warn()
        if self._rows is not None:
            self._rows.ended(rank, exit.ok)

    def reported(self, rank: int, crash: Crash | None, step: Step | None) -> None:
        """Take note of what a rank told of itself: its crash, the first time, or its progress."""
        if crash is not None:
            self._logs.note("crashed", rank=rank, type=crash.type, message=crash.message)
        if self._rows is None:
            return
        if crash is not None:
            self._rows.crashed(rank, f"{crash.type}: {crash.message}")
        elif step is not None:
            self._rows.progressed(rank, step)

    def reader(self, rank: int, stream: Stream) -> LineReader:
        reader = LineReader(rank, stream)
        self._readers.append(reader)
        return reader

    def received(self, reader: LineReader, data: bytes, now: float) -> None:
        """Show what a pipe brought."""
        self._logs.write(reader.rank, reader.stream, data)
        lines = reader.feed(data, now)
        self._logs.lines(reader.rank, reader.stream, lines)
        self._show(reader, lines, now)
        if self._rows is not None:
            self._rows.wrote(reader.rank, lines[-1] if lines else reader.held, now)
        if reader.overfull:
            self._show_part(reader, now)
        self._warn()

    def tick(self, now: float) -> None:
        """Show what has waited long enough: unfinished lines, and lines that might have folded."""
        if self._spec.on_line is not None:
            return
        if self._rows is not None and now >= self._rows.draw_at:
            self._look(self._rows, now)
        for reader in self._readers:
            if self._may_show_part(reader) and now >= reader.show_at:
                self._show_part(reader, now)
        for sink in self.sinks:
            self._put(sink, self._folders[sink.fd].due(now))

    def has_shown(self, rank: int, text: str) -> bool:
        """Tell whether a text is among the last lines of errors that a rank was seen to write.

        torch.distributed puts `[rank1]: ` before each line of a traceback: it is the same then.
        """
        mark = b"[rank%d]: " % rank
        lines = [line.removeprefix(mark) for line in self._seen.get(rank, ())]
        return text.strip().encode() in b"\n".join(lines)

    def say(self, text: str) -> None:
        """Show a line of the launcher's own, behind what ranks wrote before it."""
        self._logs.said(text)
        if self._spec.quiet:
            return
        for sink in self.sinks:
            self._put(sink, self._folders[sink.fd].flush())
        self._sinks["stderr"].say(f"[dure] {text}")
        self._sinks["stderr"].write_some()

    def _warn(self) -> None:
        """Say once that the disk takes no more of the logs."""
        trouble = self._logs.trouble
        if trouble is None or self._warned:
            return
        self._warned = True
        shown = all(is_shown(self._spec, 0, stream) for stream in ("stdout", "stderr"))
        self.say(
            f"the logs in {self._spec.log_dir} cannot be written any more: {trouble.strerror}; "
            f"output is {'shown, ' if shown else ''}no longer kept"
        )

    def conclude(self, result: JobResult) -> None:
        self._logs.conclude(result)
        self._warn()

    def finish(self) -> None:
        """Show what is left of unfinished lines, and close the files."""
        self._flush()
        if self._live:
            self._sinks["stdout"].put_area([])
        if self._spec.watcher is not None and self._rows is not None:
            self._spec.watcher.saw(self._rows.look(time.monotonic()))
        for sink in self.sinks:
            sink.finish()
        self.close()

    def close(self) -> None:
        self._logs.close()

    def _flush(self) -> None:
        for reader in self._readers:
            self._show_part(reader, 0.0)
        for sink in self.sinks:
            self._put(sink, self._folders[sink.fd].flush())

    def _look(self, rows: Rows, now: float) -> None:
        """Show the watcher where the ranks are, and draw them unless the terminal is behind."""
        seen = rows.look(now)
        if self._spec.watcher is not None:
            self._spec.watcher.saw(seen)
        sink = self._sinks["stdout"]
        if not self._live or sink.waiting:
            return
        try:
            width, height = os.get_terminal_size(sink.fd)
        except OSError:
            return
        sink.put_area(rows.draw(now, width or 80, height or 24))
        sink.write_some()

    def _show(self, reader: LineReader, lines: list[bytes], now: float) -> None:
        if not lines:
            return
        if self._spec.watcher is not None:
            self._spec.watcher.wrote(reader.rank, reader.stream, lines)
        if self._spec.on_line is not None:
            for line in lines:
                self._spec.on_line(Line(reader.rank, reader.stream, line))
            return
        local = reader.rank - self._first_rank
        if not is_shown(self._spec, local, reader.stream):
            return
        if reader.stream == "stderr":
            kept = self._seen.setdefault(reader.rank, deque(maxlen=_SEEN))
            kept.extend(line[:_SEEN_BYTES] for line in lines[-_SEEN:])
        sink = self._sinks[reader.stream]
        folder = self._folders[sink.fd]
        if reader in self._begun:  # the first is the end of a line that was shown in part
            self._begun.discard(reader)
            self._put(sink, folder.flush())
            sink.put(reader, self._prefixes.of(1 << local, self._colour[sink.fd]), lines[:1])
            lines = lines[1:]
        lines = self._tracebacks.gather(reader, reader.rank, lines)
        self._put(sink, folder.put(reader, local, reader.stream, lines, now))

    def _show_part(self, reader: LineReader, now: float) -> None:
        """Show what a pipe's reader holds back of an unfinished line."""
        sink, local = self._sinks[reader.stream], reader.rank - self._first_rank
        folder = self._folders[sink.fd]
        lines = self._tracebacks.release(reader)
        self._put(sink, folder.put(reader, local, reader.stream, lines, now))
        text = reader.flush()
        if not text:
            return
        if self._spec.on_line is not None or self._live:
            self._show(reader, [text], now)  # nothing may stay unfinished above the live view
            return
        if self._spec.watcher is not None:
            self._spec.watcher.wrote(reader.rank, reader.stream, [text])
        if is_shown(self._spec, local, reader.stream):
            self._put(sink, folder.flush())
            sink.put_part(reader, self._prefixes.of(1 << local, self._colour[sink.fd]), text)
            sink.write_some()
            self._begun.add(reader)

    def _may_show_part(self, reader: LineReader) -> bool:
        """Tell whether something of a pipe waits for its end, and need not wait for ever."""
        return self._tracebacks.holds(reader) or (reader.holds and not self._live)

    def _put(self, sink: Sink, entries: list[Entry]) -> None:
        of, colour = self._prefixes.of, self._colour[sink.fd]
        for entry in entries:
            sink.put(entry.owner, of(entry.ranks, colour), entry.text.split(b"\n"))
        sink.write_some()
