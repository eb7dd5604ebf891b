"""The page of a run (`dure run --page`) and of recorded traces (`dure view`).

A separate process serves a run's page, and the launcher sends it the state of the ranks. So
connections to its port cost the launcher neither time nor descriptors. The launcher never waits for
that process either: what does not fit into the pipe is left out, and the next message has it again.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dure.errors import UsageError
from dure.launch import JobResult, JobSpec
from dure.launch.ranks.errorfiles import temporary_folder
from dure.launch.show.rows import Row, indented
from dure.launch.show.summary import summary, where
from dure.launch.spec import RankResult, Stream
from dure.viewer.access import Access, listen
from dure.viewer.view import Feed, Outcome, RankRow, Site

_NEEDED = ("starlette", "uvicorn")
_MOST_LINES, _LONGEST_LINE = 2000, 1000  # between two messages
_LAST_S, _LEAVE_S = 1.0, 4.0
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
            "the page needs starlette and uvicorn", fix="Install them: pip install 'dure[page]'"
        )


def _address(listening: socket.socket, token: str) -> str:
    return f"http://127.0.0.1:{listening.getsockname()[1]}/#{token}"


class Page:
    """Sends the state of the run to the page's process (a `Watcher`).

    Args:
        title: The program.
        folder: Into which ranks publish.
    """

    def __init__(self, title: str, folder: Path) -> None:
        self._began = time.monotonic()
        self._lines: deque[tuple[int, Stream, bytes]] = deque(maxlen=_MOST_LINES)
        self._ranks: list[RankRow] = []
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

    def saw(self, rows: Sequence[Row]) -> None:
        """Send the state of the ranks, unless the page has not read the last message."""
        now = time.monotonic()
        self._ranks = [_rank_row(row, now) for row in rows]
        if self._write(b""):
            self._send(None)

    def conclude(self, result: JobResult) -> None:
        """Send how the run has ended."""
        deadline = time.monotonic() + _LAST_S
        while not self._write(b"") and time.monotonic() < deadline:
            select.select([], [self._pipe], [], 0.05)
        results = {rank.rank: rank for rank in result.ranks}
        for row in self._ranks:
            if (rank := results.get(row.rank)) is not None and rank.crash is None:
                if rank.finished:  # whatever ended it on its way out
                    row.state = "ended"
                elif rank.ended_by_launcher:
                    row.state = "stopped"
                row.last = row.last if rank.exit.ok or rank.finished else str(rank.exit)
        self._send(outcome_of(result))
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

    def _send(self, outcome: Outcome | None) -> None:
        lines = [(rank, str(stream), indented(line)) for rank, stream, line in self._lines]
        self._lines.clear()
        elapsed_s = time.monotonic() - self._began
        feed = Feed(elapsed_s=elapsed_s, ranks=self._ranks, lines=lines, outcome=outcome)
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


def _rank_row(row: Row, now: float) -> RankRow:
    step = row.step
    return RankRow(
        rank=row.rank,
        host=row.host,
        pid=row.pid,
        state=row.state,
        step=None if step is None else step.step,
        total=None if step is None else step.total,
        values={} if step is None else dict(step.values),
        memory=row.resident,
        cpu=row.cpu,
        quiet_s=round(now - row.spoke_at, 1) if row.state == "running" else None,
        last=row.last,
    )


def outcome_of(result: JobResult) -> Outcome:
    """Return what the page shows of a run's end."""
    failure = result.first_failure
    text = "succeeded" if result.ok else f"ended with exit code {result.exit_code}"
    return Outcome(
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
            yield dataclasses.replace(spec, env=env, watcher=page), page
