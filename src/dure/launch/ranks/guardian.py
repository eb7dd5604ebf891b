"""The guardian: a process beside the launcher that sees the job to its end if the launcher dies.

The launcher runs this file by its path, in a fresh interpreter without site packages, and tells it
of each rank that it starts, with copies of what it holds of that rank:

    python -I -S .../guardian.py SOCKET_FD JOB

    launcher ──{"pid", "prefix"}, [pidfd, stdout, stderr, report]──▶ guardian
    launcher ──its end of the socket is closed, whatever ends the launcher──▶ guardian

Then the ranks of most jobs die with their launcher (`child.py`), and the guardian kills what they
have started. Those of an elastic job live on, and the launcher has sent them here for that: as long
as one lives, the guardian reads what they print, so that printing neither fails nor blocks, and
passes it on to where the launcher's output went. SIGTERM and SIGINT to the guardian go to them, and
end them if they do not end themselves. When the last one has gone, what is left is killed.

It also keeps open, and never reads, what holds the job's key, for processes that look for it in
`/proc` (`DURE_JOB_KEY_FILE`): those of the launcher are closed to other processes.

It lives in a session of its own, so that what kills the launcher's does not reach it. Like
`child.py`, this file imports nothing of Dure but a file beside it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from types import FrameType, ModuleType

__all__ = ["follow", "main"]

_GRACE_S = 30.0
_CHUNK = 1 << 16
_MESSAGE_BYTES = 1 << 12
_NUM_FDS = 4


@dataclass(slots=True)
class _Ward:
    """A rank: what the launcher held of it, and the beginnings of lines by pipe."""

    pid: int
    prefix: bytes
    pidfd: int
    streams: dict[int, int]
    """Each pipe that is open, and where it goes: 1, 2, or -1 for nowhere."""
    partial: dict[int, bytes] = field(default_factory=dict[int, bytes])

    def read(self, pipe: int) -> bool:
        """Pass on what has come; tell whether there was any."""
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close(pipe)
            return False
        text = self.partial.get(pipe, b"") + data
        *lines, self.partial[pipe] = text.split(b"\n")
        self._show(pipe, lines)
        return True

    def close(self) -> None:
        """Pass on what is left, and let go of everything."""
        for pipe in list(self.streams):
            while pipe in self.streams and self.read(pipe):
                pass
            if pipe in self.streams:
                self._close(pipe)
        os.close(self.pidfd)

    def drop(self) -> None:
        """Let go of everything; the launcher reads it."""
        for fd in (self.pidfd, *self.streams):
            os.close(fd)

    def _close(self, pipe: int) -> None:
        rest = self.partial.pop(pipe, b"")
        if rest:
            self._show(pipe, [rest])
        os.close(pipe)
        del self.streams[pipe]

    def _show(self, pipe: int, lines: list[bytes]) -> None:
        if self.streams[pipe] < 0 or not lines:
            return
        text = b"".join(self.prefix + line + b"\n" for line in lines)
        with contextlib.suppress(OSError):  # nobody reads it any more
            os.write(self.streams[pipe], text)


def main() -> None:
    """Follow the launcher, then the ranks, then clean up."""
    link = socket.socket(fileno=int(sys.argv[1]))
    job = sys.argv[2]
    wards = follow(link)
    link.close()
    if wards:
        _Relay(wards).run()
    processes = _processes()
    processes.JobProcesses((), job).kill_all()
    processes.remove_files(job)


def follow(link: socket.socket) -> dict[int, _Ward]:
    """Take note of ranks until the launcher has ended; return those that live, by pidfd."""
    wards: dict[int, _Ward] = {}
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != link.fileno():
                poll.unregister(fd)
                wards.pop(fd).drop()
                continue
            ward = _receive(link)
            if ward is None:
                return wards
            wards[ward.pidfd] = ward
            poll.register(ward.pidfd, select.POLLIN)


def _receive(link: socket.socket) -> _Ward | None:
    data, fds, _, _ = socket.recv_fds(link, _MESSAGE_BYTES, _NUM_FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return None
    message = json.loads(data)
    pidfd, stdout, stderr, report = fds
    streams = {stdout: 1, stderr: 2, report: -1}
    return _Ward(message["pid"], message["prefix"].encode(), pidfd, streams)


class _Relay:
    """Stands in for the launcher that has died, as far as ranks need one."""

    def __init__(self, wards: dict[int, _Ward]) -> None:
        self._wards = wards
        self._deadline: float | None = None

    def run(self) -> None:
        """Return when all ranks have ended, or were to end and had their time."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        self._say(
            f"the launcher has died; its {len(self._wards)} ranks go on. "
            f"To end them: kill {os.getpid()}"
        )
        poll = select.poll()
        owners: dict[int, _Ward] = {}
        for ward in self._wards.values():
            owners[ward.pidfd] = ward
            poll.register(ward.pidfd, select.POLLIN)
            for pipe in ward.streams:
                os.set_blocking(pipe, False)
                owners[pipe] = ward
                poll.register(pipe, select.POLLIN)
        while self._wards and not self._overdue():
            for fd, _ in poll.poll(200):
                self._ready(fd, owners, poll)

    def _ready(self, fd: int, owners: dict[int, _Ward], poll: select.poll) -> None:
        ward = owners.get(fd)
        if ward is None:
            return
        if fd == ward.pidfd:
            del self._wards[fd]
            for other in (fd, *ward.streams):
                del owners[other]
                with contextlib.suppress(KeyError):
                    poll.unregister(other)
            ward.close()
        elif not ward.read(fd) and fd not in ward.streams:
            del owners[fd]
            poll.unregister(fd)

    def _overdue(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        again = self._deadline is not None
        self._deadline = time.monotonic() + (0.0 if again else _GRACE_S)
        for ward in list(self._wards.values()):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(ward.pidfd, signal.SIGTERM)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"[dure] {text}\n".encode())


def _processes() -> ModuleType:
    """Load `processes.py`, which lies beside this file."""
    path = os.path.join(os.path.dirname(__file__), "processes.py")
    spec = importlib.util.spec_from_file_location("__dure_processes__", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
