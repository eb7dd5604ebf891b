"""The reaper: a process beside the launcher that ends its ranks if the launcher cannot.

    python -I -S .../reaper.py SOCKET_FD JOB

    launcher ──"R": the ranks that run, and when they were started──▶ reaper
    launcher ──"D": the agent's deadline────────────────────────────▶ reaper
    launcher ──"W": what to report of the agent after its death─────▶ reaper
    launcher ──the socket closes, however the launcher ends─────────────▶ reaper

Past the deadline (`dure.launch.agent.membership`) it kills all that the job has on this host except
the launcher's own processes, even if the launcher was stopped. When the launcher has died, it kills
everything, removes the job's files, and then reports to the job's other agents that nothing is left
here, so that they need not wait for the lease to end.

It has a session of its own, and ignores requests to end, so that what ends the launcher does not
end it. This file imports nothing of Dure except a file beside it, so that the process is small and
starts quickly.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

__all__ = ["Reaper", "main"]

_MESSAGE_BYTES = 1 << 17
_LOOK_S = 0.5  # between two looks at the clock, which may jump when a machine wakes from sleep
_AGAIN_S = 0.01
_PROCESSES = "__dure_processes__"
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))

_SAY_DEAD = f"""
import sys
sys.path.append({_ROOT!r})
from dure.launch.agent.membership import say_dead
say_dead()
"""


class Reaper:
    """The launcher's side of its reaper.

    It waits at a socket whose other end only the launcher has, so it cannot miss its death.

    Args:
        job: The job's name in the environment of its processes.
        spared: The process of the launcher's own that has that name, too.

    Raises:
        OSError: The process cannot be started.

    Cost:
        20 ms of processor time, beside the start of the ranks.
    """

    def __init__(self, job: str, spared: int | None = None) -> None:
        import subprocess  # lazy: the process itself needs it only at its end

        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        about = json.dumps({"job": job, "spared": spared, "python": sys.executable})
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), about],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            self._link.close()
            raise
        self._link.setblocking(False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, ranks: Mapping[int, int]) -> None:
        """Report the ranks that now run, with the times of their starts (`start_times`)."""
        self._send(b"R" + json.dumps(list(ranks.items())).encode())

    def extend(self, deadline: float) -> None:
        """Report the agent's deadline, of CLOCK_BOOTTIME; from any thread."""
        self._send(b"D" + struct.pack("d", deadline))

    def appoint(self, will: bytes) -> None:
        """Send what `dure.launch.agent.membership.say_dead` needs."""
        self._send(b"W" + will)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it was killed: the job continues without
            self._link.send(message)

    def close(self) -> None:
        """End it: the launcher has cleaned up itself."""
        self._process.kill()
        self._process.wait()
        self._link.close()


def main() -> None:
    """Watch the deadline until the launcher has died, then clean up."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    link = socket.socket(fileno=int(sys.argv[1]))
    about = json.loads(sys.argv[2])
    watch = _Watch(link, about["job"], [pid for pid in [about["spared"]] if pid is not None])
    watch.run()
    link.close()
    watch.spared = []
    watch.processes().kill_all()
    _module().remove_files(about["job"])
    if watch.will:
        import subprocess  # lazy: as before

        words = [about["python"], "-P", "-c", _SAY_DEAD]
        subprocess.run(words, input=watch.will, check=False, timeout=10.0)


class _Watch:
    """What the reaper knows of the job, and its loop."""

    def __init__(self, link: socket.socket, job: str, spared: list[int]) -> None:
        self.will = b""
        self.spared = spared
        self._link, self._job = link, job
        self._ranks: dict[int, int] = {}
        self._deadline: float | None = None
        self._found: Any = None  # a JobProcesses

    def processes(self) -> Any:
        """Return the job's processes, those included that were found before."""
        if self._found is None:
            self._found = _module().JobProcesses({}, self._job)
        self._found.ranks, self._found.spared = self._ranks, frozenset(self.spared)
        return self._found

    def run(self) -> None:
        """Return when the launcher has died; kill the ranks past each deadline until then.

        An agent that joins again sends its new deadline before its new ranks start. So what was
        found to be late is killed only if nothing has arrived since.
        """
        while True:
            wait_s = late = None
            if self._deadline is not None:
                left_s = self._deadline - time.clock_gettime(time.CLOCK_BOOTTIME)
                late = self.processes().living() if left_s <= 0 else None
                wait_s = min(_LOOK_S, max(left_s, 0.0))
            if select.select([self._link], [], [], wait_s)[0]:
                message = self._link.recv(_MESSAGE_BYTES)
                if not message:
                    return
                self._receive(message[:1], message[1:])
            elif late:
                for pid in late:
                    self.processes().signal(pid, signal.SIGKILL)
                time.sleep(_AGAIN_S)
            elif late is not None:
                self._deadline = None

    def _receive(self, kind: bytes, content: bytes) -> None:
        if kind == b"D":
            (self._deadline,) = struct.unpack("d", content)
        elif kind == b"R":
            self._ranks = dict(json.loads(content))
        else:
            self.will = content


def _module() -> ModuleType:
    """Load `processes.py`, which is beside this file."""
    if _PROCESSES in sys.modules:
        return sys.modules[_PROCESSES]
    path = os.path.join(os.path.dirname(__file__), "processes.py")
    spec = importlib.util.spec_from_file_location(_PROCESSES, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
