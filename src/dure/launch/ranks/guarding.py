"""The launcher's side of the guardian (`guardian`), which outlives it if need be."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dure.launch.ranks.spawn import RankProcess

__all__ = ["Guardian", "guarded"]

_GUARDIAN = str(Path(__file__).with_name("guardian.py"))


class Guardian:
    """A running guardian.

    Args:
        job: The job's name in the environment of its processes.
        shows: Whether it has this process's output, to pass on what ranks print.
        keeps: Descriptors that it is to have open, under the same numbers, as long as it lives.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, job: str, *, shows: bool, keeps: tuple[int, ...]) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = None if shows else subprocess.DEVNULL
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", _GUARDIAN, str(theirs.fileno()), job],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(), *keeps),
                    start_new_session=True,
                )
        except BaseException:
            self._link.close()
            raise
        self._link.setblocking(False)

    @property
    def pid(self) -> int:
        """The process number."""
        return self._process.pid

    def watch(self, process: RankProcess) -> None:
        """Give it what it needs to stand in for the launcher towards a rank that may outlive it."""
        message = json.dumps({"pid": process.pid, "prefix": f"[{process.rank}] "}).encode()
        fds = (
            process.pidfd,
            process.stdout.fileno(),
            process.stderr.fileno(),
            process.report_fd,
        )
        with contextlib.suppress(OSError):  # it was killed: the job goes on without
            socket.send_fds(self._link, [message], fds)

    def close(self) -> None:
        """End it: the launcher has cleaned up itself."""
        self._process.kill()
        self._process.wait()
        self._link.close()


@contextlib.contextmanager
def guarded(job: str, *, shows: bool = False, keeps: tuple[int, ...] = ()) -> Iterator[Guardian]:
    """Keep a guardian for as long as the job runs.

    It waits at a socket whose other end only the launcher holds, so it cannot miss its death.
    Cost: 20 ms of processor time, beside the start of the ranks.
    """
    guardian = Guardian(job, shows=shows, keeps=keeps)
    try:
        yield guardian
    finally:
        guardian.close()
