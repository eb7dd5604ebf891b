"""The reaper: a process beside the launcher that ends its ranks where the launcher cannot.

    python -I -S .../reaper.py SOCKET_FD JOB

    launcher ──"D": the agent's deadline────────────────────────────▶ reaper
    launcher ──"W": what to say of the agent after its death────────▶ reaper
    launcher ──its end of the socket closes, whatever ends the launcher──▶ reaper

Past the deadline (`dure.launch.agent.membership`) it kills all that the job has on this host but
the launcher's own processes, also where the launcher was stopped and cannot. When the launcher has
died, it kills everything, removes the job's files, and then says to the job's other agents that
nothing is left here, so that they need not wait for the lease to end.

It lives in a session of its own, so that what kills the launcher's does not reach it. This file
imports nothing of Dure but a file beside it, so that the process is small and quickly there.
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
from types import ModuleType

__all__ = ["Reaper", "main"]

_MESSAGE_BYTES = 1 << 16
_LOOK_S = 0.5
"""Between two looks at the clock, which may jump where a machine wakes from sleep."""

_AGAIN_S = 0.01
_PROCESSES = "__dure_processes__"

_SAY_DEAD = "from dure.launch.agent.membership import say_dead; say_dead()"


class Reaper:
    """The launcher's side of its reaper.

    It waits at a socket whose other end only the launcher holds, so it cannot miss its death.

    Args:
        job: The job's name in the environment of its processes.
        spared: The process of the launcher's own that has that name, too.

    Raises:
        OSError: The process cannot be started.

    Cost: 20 ms of processor time, beside the start of the ranks.
    """

    def __init__(self, job: str, spared: int | None = None) -> None:
        import subprocess  # lazy: the process itself needs it only at its end

        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told = json.dumps({"job": job, "spared": spared, "python": sys.executable})
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), told],
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

    def extend(self, deadline: float) -> None:
        """Tell it the agent's deadline, of CLOCK_BOOTTIME; from any thread."""
        self._send(b"D" + struct.pack("d", deadline))

    def appoint(self, will: bytes) -> None:
        """Tell it what `dure.launch.agent.membership.say_dead` needs."""
        self._send(b"W" + will)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # it was killed: the job goes on without
            self._link.send(message)

    def close(self) -> None:
        """End it: the launcher has cleaned up itself."""
        self._process.kill()
        self._process.wait()
        self._link.close()


def main() -> None:
    """Mind the deadline until the launcher has died, then clean up."""
    link = socket.socket(fileno=int(sys.argv[1]))
    told = json.loads(sys.argv[2])
    will = _mind(link, told["job"], (told["spared"],))
    link.close()
    processes = _processes()
    processes.JobProcesses((), told["job"]).kill_all()
    processes.remove_files(told["job"])
    if will:
        import subprocess  # lazy: as before

        subprocess.run([told["python"], "-c", _SAY_DEAD], input=will, check=False, timeout=10.0)


def _mind(link: socket.socket, job: str, spared: tuple[int | None]) -> bytes:
    """Kill the ranks past each deadline; return the last will when the launcher has died.

    Who joins again says its new deadline before its new ranks start. So what was found to be late
    is killed only if nothing has been said since.
    """
    deadline, will = None, b""
    while True:
        late, wait_s, passed = [], None, False
        if deadline is not None:
            left_s = deadline - time.clock_gettime(time.CLOCK_BOOTTIME)
            passed, wait_s = left_s <= 0, min(max(left_s, 0.0), _LOOK_S)
        if passed:
            late = _processes().JobProcesses((), job, spared).others()
        if select.select([link], [], [], wait_s)[0]:
            data = link.recv(_MESSAGE_BYTES)
            if not data:
                return will
            if data[:1] == b"D":
                (deadline,) = struct.unpack("d", data[1:])
            else:
                will = data[1:]
        elif passed and not late:
            deadline = None
        else:
            for process in late:
                _processes().JobProcesses((), job, spared).signal(process.pid, signal.SIGKILL)
            time.sleep(_AGAIN_S if late else 0.0)


def _processes() -> ModuleType:
    """Load `processes.py`, which lies beside this file."""
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
