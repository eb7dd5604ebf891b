"""What tests of processes share: waiting for a condition, ports that are free, files with a key."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dure.store.key import mint

T = TypeVar("T")


def until(
    look: Callable[[], T], what: str | Callable[[], str] = "a condition", limit_s: float = 60.0
) -> T:
    """Return what `look` returns once that is true; `what` says what was waited for in vain."""
    deadline = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain for {what if isinstance(what, str) else what()}")
        time.sleep(0.01)
    return found


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
