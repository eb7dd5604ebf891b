"""An etcd cluster on loopback addresses of this machine, for tests: real members, to be killed."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

PROGRAM = shutil.which("etcd")


class Etcd:
    """A cluster.

    Args:
        folder: Where the members keep their data; short-lived, so nothing is synced.
        size: How many members.
        flags: More flags of all of them.
        scheme: https where `flags` say so; then nobody waits until it is healthy.
    """

    def __init__(
        self, folder: Path, size: int = 1, flags: Sequence[str] = (), scheme: str = "http"
    ) -> None:
        with contextlib.ExitStack() as held:
            probes = [held.enter_context(socket.socket()) for _ in range(2 * size)]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            ports = [probe.getsockname()[1] for probe in probes]
        self.endpoints = [f"127.0.0.1:{port}" for port in ports[:size]]
        peers = [f"http://127.0.0.1:{port}" for port in ports[size:]]
        cluster = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
        assert PROGRAM is not None
        self._words = [
            [
                PROGRAM,
                f"--name=m{i}",
                f"--data-dir={folder / f'm{i}'}",
                f"--listen-client-urls={scheme}://{self.endpoints[i]}",
                f"--advertise-client-urls={scheme}://{self.endpoints[i]}",
                f"--listen-peer-urls={peers[i]}",
                f"--initial-advertise-peer-urls={peers[i]}",
                f"--initial-cluster={cluster}",
                "--heartbeat-interval=50",
                "--election-timeout=500",
                "--logger=zap",
                "--log-level=error",
                *flags,
            ]
            for i in range(size)
        ]
        self.members = [self._start(words) for words in self._words]
        if scheme == "http":
            self.await_healthy()

    @property
    def names(self) -> str:
        """All endpoints, with commas."""
        return ",".join(self.endpoints)

    def kill(self, number: int) -> None:
        """Kill a member."""
        self.members[number].kill()
        self.members[number].wait()

    def start_again(self, number: int) -> None:
        """Start a member that was killed, with the data it had."""
        self.members[number] = self._start(self._words[number])

    def pause(self, number: int) -> None:
        """Let a member say nothing: its connections stand, and nobody answers."""
        self.members[number].send_signal(signal.SIGSTOP)

    def go_on(self, number: int) -> None:
        """Let a paused member go on."""
        self.members[number].send_signal(signal.SIGCONT)

    def ask(self, path: str, body: dict[str, object]) -> dict[str, object]:
        """Put a request as an administrator would."""
        url = f"http://{self.endpoints[0]}/v3/{path}"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=5) as answer:
            return json.load(answer)

    def await_healthy(self) -> None:
        """Wait until every member answers."""
        ends = time.monotonic() + 60
        for endpoint in self.endpoints:
            while True:
                health = f"http://{endpoint}/health"
                with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=1) as it:
                    if b"true" in it.read():
                        break
                assert time.monotonic() < ends, f"{endpoint} does not come up"
                time.sleep(0.05)

    def end(self) -> None:
        """Kill them all."""
        for member in self.members:
            member.kill()
            member.wait()

    @staticmethod
    def _start(words: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def etcd(size: int = 1, flags: Sequence[str] = (), scheme: str = "http") -> Iterator[Etcd]:
    """Run a cluster."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as at:
        cluster = Etcd(Path(at), size, flags, scheme)
        try:
            yield cluster
        finally:
            cluster.end()
