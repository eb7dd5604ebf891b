"""An etcd cluster on loopback addresses of this machine, for tests: real members, to be killed."""

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dure.launch.ranks.ports import reserve_port
from tests.waiting import PATIENCE_S, stop, until

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
        reserved = [reserve_port() for _ in range(2 * size)]
        self._keepers = [keeper for keeper, _ in reserved]
        ports = [port for _, port in reserved]
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
        stop(self.members[number].pid)

    def go_on(self, number: int) -> None:
        """Let a paused member go on."""
        self.members[number].send_signal(signal.SIGCONT)

    def ask(self, path: str, body: Mapping[str, object], member: int = 0) -> dict[str, object]:
        """Put a request to a member as an administrator would."""
        url = f"http://{self.endpoints[member]}/v3/{path}"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def await_healthy(self) -> None:
        """Wait until every member answers."""

        def is_healthy(endpoint: str) -> bool:
            health = f"http://{endpoint}/health"
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=1) as it:
                return b"true" in it.read()
            return False

        for endpoint in self.endpoints:
            until(lambda at=endpoint: is_healthy(at), f"a healthy member at {endpoint}")

    def end(self) -> None:
        """Kill them all."""
        for member in self.members:
            member.kill()
            member.wait()
        for keeper in self._keepers:
            keeper.close()

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
