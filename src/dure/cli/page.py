"""The page of a run (`dure run --page`) and of recorded traces (`dure view`).

A separate process serves a run's page, and the launcher sends it the state of the ranks. So
connections to its port cost the launcher neither time nor descriptors. The launcher never waits for
that process either: a message that does not fit into the pipe is dropped, and the next one has it
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import re
import select
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
import typer

from dure.errors import UsageError
from dure.launch import JobResult, JobSpec
from dure.launch.ranks.errorfiles import temporary_folder
from dure.launch.ranks.report import ReportedStep
from dure.launch.show.summary import summary, where
from dure.launch.spec import RankResult, Stream
from dure.viewer.access import Access, listen
from dure.viewer.view import Feed, RankRow, RunOutcome, Site

_NEEDED = ("starlette", "uvicorn")
_MOST_LINES, _LONGEST_LINE = 2000, 1000  # between two messages
_LOOKED_AT = 500  # bytes of a line
_REFRESH_S, _USAGE_S = 0.2, 1.0
_LAST_S, _LEAVE_S = 1.0, 4.0
_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
_LAST = re.compile(
    r"(?P<call>.+?)(?: of group '.*?')?(?: at (?P<at>\S.*:\d+))?, "
    r"(?P<how>[^,]+?)(?: [\d.e+-]+ s earlier)?"
)


def view(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="Flight records (rank0.json, ...), or their folders."),
    ],
) -> None:
    """Show recorded traces as a page on this machine, until interrupted."""
    _require_server()
    from dure.viewer.server import serve  # lazy: only where it is installed
    from dure.viewer.sources import Recorded  # lazy: brings asyncio

    source, access = Recorded(paths), Access()
    with listen() as listening:
        print(f"The page: {_address(listening, access.token)}", flush=True)
        print("It can be opened once, in one browser. Ctrl-C ends it.", flush=True)
        asyncio.run(serve(source, access, listening))


def _require_server() -> None:
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        raise UsageError(
            "the page needs starlette and uvicorn",
            fix="Install them: pip install '.[page]' in the checkout of Dure.",
        )


def _address(listening: socket.socket, token: str) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}/#{token}"


class RankTable:
    """What is known of each rank of this host; times are on `time.monotonic`."""

    def __init__(self) -> None:
        self.rows: dict[int, RankRow] = {}
        self._processes: dict[int, psutil.Process] = {}
        self._spoke_at: dict[int, float] = {}
        self._measured_at = float("-inf")

    def noted(self, event: Mapping[str, Any]) -> None:
        """Record an event of the job (docs/launch.md, "Events")."""
        name, rank = event["event"], event.get("rank", -1)
        if name == "started":
            self.rows[rank] = RankRow(rank=rank, host=event["host"], pid=event["pid"])
            self._spoke_at[rank] = time.monotonic()
            self._processes.pop(rank, None)
        elif name == "crashed":
            row = self.rows[rank]
            row.state, row.last = "failed", shown(f"{event['type']}: {event['message']}".encode())
        elif name == "ended":
            row = self.rows[rank]
            row.state = "ended" if event["code"] == 0 else "failed"  # no code: by a signal
            row.memory = row.cpu = None

    def progressed(self, rank: int, step: ReportedStep) -> None:
        """Record a rank's step."""
        row = self.rows[rank]
        row.step, row.total, row.values = step.step, step.total, dict(step.values)

    def spoke(self, rank: int, line: bytes) -> None:
        """Record the last line that a rank wrote, complete or not."""
        row = self.rows[rank]
        if row.state == "running" and line.strip():
            row.last = shown(line[-_LOOKED_AT:]).strip()
            self._spoke_at[rank] = time.monotonic()

    def measure(self, now: float) -> None:
        """Read memory and processor time again, if the last time was long ago."""
        usage = now - self._measured_at >= _USAGE_S
        self._measured_at = now if usage else self._measured_at
        for rank, row in self.rows.items():
            running = row.state == "running"
            row.quiet_s = round(now - self._spoke_at[rank], 1) if running else None
            if running and usage:
                self._read_usage(row)

    def _read_usage(self, row: RankRow) -> None:
        try:
            first = row.rank not in self._processes
            process = self._processes.setdefault(row.rank, psutil.Process(row.pid))
            row.memory, cpu = process.memory_info().rss, process.cpu_percent() / 100
            row.cpu = None if first else cpu
        except psutil.Error:
            row.memory = row.cpu = None


def shown(line: bytes) -> str:
    """Return what a line looks like: its last redraw, without control characters."""
    text = _ESCAPES.sub("", line.decode(errors="replace"))
    text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    return "".join(c if c.isprintable() else " " for c in text).rstrip()


class Page(RankTable):
    """Sends the state of the run to the page's process (a `Watcher`).

    Args:
        title: The program.
        folder: Into which ranks publish.
    """

    def __init__(self, title: str, folder: Path) -> None:
        super().__init__()
        self.due_at = 0.0
        self._began = time.monotonic()
        self._lines: deque[tuple[int, Stream, bytes]] = deque(maxlen=_MOST_LINES)
        self._rest = b""
        access = Access()
        with listen() as listening:
            self.address = _address(listening, access.token)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dure.viewer", str(folder), str(listening.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(listening.fileno(),),
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._write(msgspec.json.encode((access.token, title)) + b"\n")

    def wrote(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        """Keep lines that a rank wrote for the next message."""
        self._lines.extend((rank, stream, line[-_LONGEST_LINE:]) for line in lines)

    def tick(self, now: float) -> None:
        """Send the state of the ranks, unless the page has not read the last message."""
        self.due_at = now + _REFRESH_S
        self.measure(now)
        if self._write(b""):
            self._send(None)

    def conclude(self, result: JobResult) -> None:
        """Send how the run has ended."""
        deadline = time.monotonic() + _LAST_S
        self._wait(deadline)
        for rank in result.ranks:
            row = self.rows.get(rank.rank)
            if row is not None and rank.crash is None:
                if rank.finished:  # whatever ended it on its way out
                    row.state = "ended"
                elif rank.ended_by_launcher:
                    row.state = "stopped"
                row.last = row.last if rank.exit.ok or rank.finished else str(rank.exit)
        self._send(outcome_of(result))
        self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        """Wait until all is written, or the deadline is over."""
        while not self._write(b"") and time.monotonic() < deadline:
            select.select([], [self._pipe], [], 0.05)

    def close(self) -> None:
        """End the page's process, once browsers have its last state."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, outcome: RunOutcome | None) -> None:
        lines = [(rank, str(stream), shown(line)) for rank, stream, line in self._lines]
        self._lines.clear()
        elapsed_s = time.monotonic() - self._began
        ranks = list(self.rows.values())
        feed = Feed(elapsed_s=elapsed_s, ranks=ranks, lines=lines, outcome=outcome)
        self._write(msgspec.json.encode(feed) + b"\n")

    def _write(self, data: bytes) -> bool:
        """Write the rest, then `data`, without waiting; return whether all was written."""
        self._rest += data
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._pipe, self._rest) :]
        except BlockingIOError:
            return False
        except OSError:  # the page's process has ended, the run has not
            self._rest = b""
        return True


def outcome_of(result: JobResult) -> RunOutcome:
    """Return what the page shows of a run's end."""
    failure = result.first_failure
    text = "succeeded" if result.ok else f"ended with exit code {result.exit_code}"
    return RunOutcome(
        ok=result.ok,
        text=f"{text} after {result.elapsed_s:.1f} s",
        headline="" if failure is None else summary(result)[0],
        traceback="" if failure is None or failure.crash is None else failure.crash.traceback,
        first=None if failure is None else failure.rank,
        sites=[] if failure is None else [_site(rank) for rank in result.ranks if rank.last],
    )


def _site(rank: RankResult) -> Site:
    """Return a rank's last operation, read from its text (`trace.line.last_operation`)."""
    read = _LAST.fullmatch(rank.last)
    call, at, how = (read["call"], read["at"] or "", read["how"]) if read else (rank.last, "", "")
    elsewhere = how == "ended" and bool(rank.stack)
    stack = where(rank.stack) if elsewhere else ""
    return Site(ranks=[rank.rank], call=call, at=at, how=how, where=stack)


@contextlib.contextmanager
def shown_on_page(spec: JobSpec) -> Iterator[tuple[JobSpec, Page]]:
    """Serve a page while the block runs the job; yield the job as it is to be run for that.

    Raises:
        UsageError: The server is not installed.
    """
    _require_server()
    with temporary_folder(f"page_{uuid.uuid4().hex}") as folder:
        page = Page(" ".join((spec.program, *spec.args)), folder)
        with contextlib.closing(page):
            print(f"[dure] the page: {page.address}", file=sys.stderr, flush=True)
            env = {**spec.env, "DURE_PAGE_DIR": str(folder)}
            yield dataclasses.replace(spec, env=env, watcher=page, on_event=page.noted), page
