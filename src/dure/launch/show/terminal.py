"""Where the ranks' output goes: to the terminal or to a function, and to files if requested.

A rank's bytes pass through: pipe, log file (unchanged), `LineReader` or, on a terminal, `Screen`
(lines), `LineFolder` (equal lines of several ranks, once), `Sink` (with a prefix). A caller's
function (`JobSpec.on_line`) gets every line in place of the last two.

With one rank on this host, and none of the options that ask for its output, the rank gets the
launcher's terminal itself (`inherits`). Otherwise its variables say that a terminal shows what it
writes (`terminal_variables`), so that it prints colors and draws progress bars.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections import deque

from dure import env
from dure.launch.ranks.environment import Round
from dure.launch.ranks.report import ReportedStep
from dure.launch.ranks.spawn import RankProcess
from dure.launch.show.folding import WINDOW_S, Entry, LineFolder, Prefixes, Tracebacks
from dure.launch.show.logs import Logs, is_shown
from dure.launch.show.output import LineReader, Sink, same_file
from dure.launch.show.screen import Screen
from dure.launch.spec import Crash, Exit, JobResult, JobSpec, Line, Stream

__all__ = ["Terminal", "terminal_variables"]

_DRAW_S = 0.05  # between two drawings of progress bars
_SEEN = 200
_SEEN_BYTES = 1 << 13  # of each of these lines
_COLOR = re.compile(rb"\x1b\[[\d;]*m")


def terminal_variables(spec: JobSpec) -> dict[str, str]:
    """Return the variables by which ranks learn that a terminal shows what they write.

    rich and many others read FORCE_COLOR and TTY_COMPATIBLE, tqdm COLUMNS and LINES. A variable
    that is already set is left alone.
    """
    fd = next((fd for fd in (2, 1) if os.isatty(fd)), None)
    if fd is None or spec.on_line is not None or _is_dumb():
        return {}
    try:
        columns, lines = os.get_terminal_size(fd)
    except OSError:
        return {}
    found = {"TTY_COMPATIBLE": "1"}
    if not env.text("NO_COLOR"):
        found["FORCE_COLOR"] = "1"
    if columns and lines:
        prefix = len(Prefixes(0, spec.nproc * spec.nnodes[1]).of(1, colour=False))
        width = columns - (0 if spec.prefix == "none" else prefix)
        found |= {"COLUMNS": str(max(20, width)), "LINES": str(lines)}
    present = env.everything()
    return {name: value for name, value in found.items() if name not in present}


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
        self._folders = {sink.fd: LineFolder([0]) for sink in self.sinks}
        self._colour = {sink.fd: sink.terminal and not env.text("NO_COLOR") for sink in self.sinks}
        self._prefixes = Prefixes(0, spec.nproc)
        self._first_rank = 0
        self._seen: dict[int, deque[bytes]] = {}  # a rank's last lines of standard error
        self._tracebacks = Tracebacks()
        self._drawn_at = float("-inf")
        self._changed = False  # progress bars are to be drawn
        self._day = time.time() - time.monotonic()
        self._warned = False
        self._logs = Logs(spec)

    @property
    def full(self) -> bool:
        """Whether the ranks must wait until more has been taken."""
        return any(sink.full for sink in self.sinks)

    @property
    def broken(self) -> bool:
        """Whether the standard output cannot be written any more."""
        return self._sinks["stdout"].broken

    @property
    def unread(self) -> bool:
        """Whether a broken standard output has no reader, and is not a full disk."""
        trouble = self._sinks["stdout"].trouble
        return trouble is None or trouble.errno == errno.EPIPE

    @property
    def why_broken(self) -> str:
        """Why nothing is written to the standard output any more."""
        trouble = self._sinks["stdout"].trouble
        if trouble is None or self.unread:
            return "the output was closed by its reader"
        return f"the output cannot be written: {trouble.strerror}"

    @property
    def wake_at(self) -> float | None:
        """When `tick` is to be called."""
        times = [] if self._spec.watcher is None else [self._spec.watcher.due_at]
        if self._spec.on_line is None:
            times += [reader.show_at for reader in self._readers if self._may_show_part(reader)]
            times += [f.wake_at for f in self._folders.values() if f.wake_at is not None]
            times += [self._drawn_at + _DRAW_S] if self._changed else []
        return min(times, default=None)

    def begin(self, this_round: Round) -> None:
        """Start on a round of the job: its ranks, their number and files.

        Raises:
            OSError: The log files of the first round cannot be made.
        """
        self._flush()
        self._readers.clear()
        self._tracebacks = Tracebacks()
        self._first_rank = this_round.first_rank
        spec, several = self._spec, this_round.num_hosts > 1
        with_host = spec.prefix == "host" or (spec.prefix == "auto" and several)
        host = this_round.host if with_host else None
        shown = spec.prefix != "none"
        self._prefixes = Prefixes(this_round.first_rank, this_round.world_size, host, shown)
        for stream, sink in self._sinks.items():
            ranks = [r for r in range(this_round.nproc) if is_shown(spec, r, stream)]
            self._folders[sink.fd] = LineFolder(ranks, WINDOW_S if spec.fold else 0.0)
        self._logs.begin(this_round)
        self._warn()

    def started(self, process: RankProcess) -> None:
        """Record that a rank has started."""
        self._logs.note("started", rank=process.rank, pid=process.pid, host=process.host)

    def ended(self, process: RankProcess, how: Exit) -> None:
        """Record that a rank has ended."""
        rank, pid = process.rank, process.pid
        self._logs.note("ended", rank=rank, pid=pid, code=how.code, signal=how.signal)
        self._warn()

    def reported(self, rank: int, crash: Crash | None, step: ReportedStep | None) -> None:
        """Record what a rank reported: its crash, the first time, or its progress."""
        if crash is not None:
            self._logs.note("crashed", rank=rank, type=crash.type, message=crash.message)
        elif step is not None and self._spec.watcher is not None:
            self._spec.watcher.progressed(rank, step)

    def reader(self, rank: int, stream: Stream) -> LineReader:
        """Return what cuts a pipe's bytes into lines."""
        draws = self._sinks[stream].terminal and self._spec.on_line is None and not _is_dumb()
        reader = Screen(rank, stream) if draws else LineReader(rank, stream)
        self._readers.append(reader)
        return reader

    def received(self, reader: LineReader, data: bytes, now: float) -> None:
        """Show what a pipe brought."""
        self._logs.write(reader.rank, reader.stream, data)
        lines = reader.feed(data, now)
        self._logs.lines(reader.rank, reader.stream, lines)
        self._changed = self._changed or bool(reader.rows)
        if lines:
            self._settle_others(reader, now)
        self._show(reader, lines, now)
        if self._spec.watcher is not None:
            self._spec.watcher.spoke(reader.rank, lines[-1] if lines else reader.held)
        if reader.overfull:
            self._show_part(reader, now)
        self._warn()

    def tick(self, now: float) -> None:
        """Show what has waited long enough: unfinished lines, and lines that might have folded."""
        if self._spec.watcher is not None and now >= self._spec.watcher.due_at:
            self._spec.watcher.tick(now)
        if self._spec.on_line is not None:
            return
        for reader in self._readers:
            if self._may_show_part(reader) and now >= reader.show_at:
                self._show_part(reader, now)
        for sink in self.sinks:
            self._put(sink, self._folders[sink.fd].due(now))
        if self._changed and now >= self._drawn_at + _DRAW_S:
            self._draw(now)

    def note(self, event: str, **fields: object) -> None:
        """Keep an event of the job, and show it to the user's hook."""
        self._logs.note(event, **fields)

    def has_shown(self, rank: int, text: str) -> bool:
        """Whether a text is among the last lines of standard error that a rank was seen to write.

        torch.distributed puts `[rank1]: ` before each line of a traceback, and Python colors it.
        """
        mark = b"[rank%d]: " % rank
        lines = [_COLOR.sub(b"", line).removeprefix(mark) for line in self._seen.get(rank, ())]
        return text.strip().encode() in b"\n".join(lines)

    def say(self, text: str) -> None:
        """Show a line of the launcher, behind what ranks wrote before it."""
        self._logs.said(text)
        if self._spec.quiet:
            return
        for sink in self.sinks:
            self._put(sink, self._folders[sink.fd].flush())
        self._sinks["stderr"].say(f"{self._stamp(time.monotonic()).decode()}[dure] {text}")
        self._sinks["stderr"].write_some()

    def _warn(self) -> None:
        """Report once that the disk takes no more of the logs."""
        trouble = self._logs.trouble
        if trouble is None or self._warned:
            return
        self._warned = True
        shown = all(is_shown(self._spec, 0, stream) for stream in ("stdout", "stderr"))
        self.say(
            f"the logs in {self._spec.log_dir} cannot be written any more: {trouble.strerror}; "
            f"output is {'shown, ' if shown else ''}no longer kept"
            if self._spec.log_dir is not None
            else f"{self._spec.event_log} cannot be written any more: {trouble.strerror}"
        )

    def conclude(self, result: JobResult) -> None:
        """Keep the result of the job."""
        self._logs.conclude(result)
        self._warn()

    def finish(self) -> None:
        """Show what is left of unfinished lines, and close the files."""
        self._flush()
        if self._spec.watcher is not None:
            self._spec.watcher.tick(time.monotonic())
        for sink in self.sinks:
            sink.finish()
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._logs.close()

    def _flush(self) -> None:
        now = time.monotonic()
        for sink in self.sinks:
            sink.put_area([])
        for reader in self._readers:
            if reader.rows:
                self._show(reader, reader.flush().split(b"\n"), now)
            self._show_part(reader, now)
        for sink in self.sinks:
            self._put(sink, self._folders[sink.fd].flush())

    def _draw(self, now: float) -> None:
        """Draw the progress bars, unless the terminal has not taken the last drawing."""
        self._drawn_at, self._changed = now, False
        for sink in self.sinks:
            if sink.waiting:
                self._changed = True
                continue
            readers = [r for r in self._readers if self._sinks[r.stream] is sink]
            rows = [row for reader in readers for row in self._bars(reader, sink)]
            if rows:
                most = max(1, _num_lines(sink.fd) // 2)
                more = len(rows) - most
                rows[most:] = [b"... and %d more" % more] if more > 0 else []
            sink.put_area(rows)
            sink.write_some()

    def _bars(self, reader: LineReader, sink: Sink) -> list[bytes]:
        """Return what a rank draws, with its prefix."""
        local = reader.rank - self._first_rank
        if not is_shown(self._spec, local, reader.stream):
            return []
        prefix = self._prefixes.of(1 << local, self._colour[sink.fd])
        return [prefix + row for row in reader.rows if row.strip()]

    def _show(self, reader: LineReader, lines: list[bytes], now: float, part: bytes = b"") -> None:
        """Show lines of a pipe, and a part of the next one."""
        shown = [*lines, part] if part else lines
        if not shown:
            return
        if self._spec.watcher is not None:
            self._spec.watcher.wrote(reader.rank, reader.stream, shown)
        if self._spec.on_line is not None:
            for line in shown:
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
        if lines and sink.is_behind(reader):  # the first is the end of a line that was begun
            sink.put(reader, b"", lines[:1])
            lines = lines[1:]
        lines = self._tracebacks.gather(reader, lines)
        self._put(sink, folder.put(reader, local, reader.stream, lines, now))
        if part:
            self._put(sink, folder.flush())
            sink.put_part(reader, self._prefix(sink, 1 << local, now), part)
            sink.write_some()

    def _show_part(self, reader: LineReader, now: float) -> None:
        """Show what a pipe's reader holds back of an unfinished line, or of its rows."""
        sink, local = self._sinks[reader.stream], reader.rank - self._first_rank
        lines = self._tracebacks.release(reader)
        self._put(sink, self._folders[sink.fd].put(reader, local, reader.stream, lines, now))
        self._changed = self._changed or bool(reader.rows)
        lines, part = reader.overdue()
        self._show(reader, lines, now, part)

    def _settle_others(self, reader: LineReader, now: float) -> None:
        """Show a rank's finished progress bar before what it prints next on its other stream."""
        for other in self._readers:
            if other.rank == reader.rank and other is not reader and other.rows and other.holds:
                self._show_part(other, now)

    def _may_show_part(self, reader: LineReader) -> bool:
        """Whether something of a pipe waits for its end, and need not wait forever."""
        return self._tracebacks.holds(reader) or reader.holds

    def _put(self, sink: Sink, entries: list[Entry]) -> None:
        for entry in entries:
            prefix = self._prefix(sink, entry.ranks, entry.at)
            sink.put(entry.owner, prefix, entry.text.split(b"\n"))
        sink.write_some()

    def _prefix(self, sink: Sink, ranks: int, at: float) -> bytes:
        return self._stamp(at) + self._prefixes.of(ranks, self._colour[sink.fd])

    def _stamp(self, at: float) -> bytes:
        """Return the time of day with milliseconds, if it was requested."""
        if not self._spec.timestamps:
            return b""
        seconds = self._day + at
        text = time.strftime("%H:%M:%S", time.localtime(seconds))
        return f"{text}.{int(seconds * 1000) % 1000:03} ".encode()


def _is_dumb() -> bool:
    """Whether the terminal cannot move its cursor."""
    return env.everything().get("TERM") == "dumb"


def _num_lines(fd: int) -> int:
    """Return how many lines a terminal has; 1 if it was closed."""
    try:
        return os.get_terminal_size(fd).lines
    except OSError:
        return 1
