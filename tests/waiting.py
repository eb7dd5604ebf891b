"""What tests of processes share: waiting for a condition, ports that are free, files with a key."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from dure.store.key import mint

T = TypeVar("T")

# The limit of every wait that only ends a hang. No test passes or fails because of its value: a
# busy machine may need many times what a quiet one does. It is below pytest's own limit per test,
# so the wait fails with its own words. Also the default of `run_ranks` and `ProcessPool` in tests.
PATIENCE_S = int(os.environ.setdefault("DURE_TEST_TIMEOUT", "240"))


def descriptors() -> set[str]:
    """List this process's open descriptors, each as its number and what it is open on.

    To find what is left compare sets, not counts: one that was open before may close meanwhile.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed by now, as the listing's own is
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def until(
    look: Callable[[], T],
    what: str | Callable[[], str] = "a condition",
    limit_s: float = PATIENCE_S,
) -> T:
    """Return the first true result of `look`; `what` names it in the error at the limit.

    Looks get rarer, since some read all of /proc: the last comes late by a twentieth of the wait.
    """
    begin = time.monotonic()
    while not (found := look()):
        waited_s = time.monotonic() - begin
        if waited_s > limit_s:
            raise AssertionError(f"did not come: {what if isinstance(what, str) else what()}")
        time.sleep(min(0.001 + waited_s / 20, 0.03))
    return found


def waits_in_join(thread: threading.Thread) -> bool:
    """Return whether a thread waits for the end of another one."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not threading.Thread.join.__code__:
        frame = frame.f_back
    return frame is not None


def stop(pid: int) -> None:
    """Stop a process by SIGSTOP, and wait until it has stopped: on a busy machine it runs on."""
    os.kill(pid, signal.SIGSTOP)
    state = Path(f"/proc/{pid}/stat")
    until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", f"the stop of {pid}")


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def key_file(path: Path, raw: bytes = b"") -> Path:
    """Write a job key, a new one unless it is given, that its owner alone may read."""
    path.touch(0o600)
    path.write_bytes(raw or mint().raw)
    return path


def listening(port: int) -> set[str]:
    """Return the inodes of the sockets that listen at a port of 127.0.0.1."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {f[9] for f in fields if f[1] == f"0100007F:{port:04X}" and f[3] == "0A"}
