"""Hosts on one machine: network namespaces on a bridge, each rank in its host's own namespaces.

A host is a network namespace with one address, 10.x.y.z, joined by a veth pair to a bridge in a
namespace of its own, so that this machine's own network is never touched. Its ranks run there with
a host name of the host's (UTS namespace), and share one PID namespace that no other host shares, so
Dure takes them for what they play: processes that cannot reach other hosts' memory.

Everything is named after this process and taken away at the end, whatever happened. If this process
is killed, its hosts' processes die with it, and the next one takes the empty namespaces away.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

PORT = 29500  # of rank 0's own namespace, where nobody else is
ADDRESS = "10.213.7.{}"


@functools.cache
def why_not() -> str:
    """Return why hosts cannot be made here; empty if they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    missing = [
        tool for tool in ("ip", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None
    ]
    if missing:
        return f"{' and '.join(missing)} not found"
    name = f"dure-{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this container may not make network namespaces"
    veth = ["ip", "-n", name, "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"]
    bad = subprocess.run(veth, capture_output=True, check=False).returncode
    subprocess.run(["ip", "netns", "del", name], check=True)
    return "the kernel has no veth devices" if bad else ""


_DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


def _sweep() -> None:
    """Take away the namespaces of test processes that were killed, if nothing lives there."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    for name in (line.split()[0] for line in listed.stdout.splitlines()):
        found = re.match(r"dure-([0-9]+)", name)
        if found is None or Path(f"/proc/{found[1]}").exists():
            continue
        words = ["ip", "netns", "pids", name]
        inside = subprocess.run(words, capture_output=True, text=True, check=False)
        if inside.returncode == 0 and not inside.stdout.strip():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Host:
    """One host: a network namespace, and a process that holds its UTS and PID namespaces.

    Args:
        name: The host's name.
        number: Its number, from 0.
        switch: The namespace with the bridge.
    """

    def __init__(self, name: str, number: int, switch: str) -> None:
        self.name, self.address = name, ADDRESS.format(number + 1)
        self.net, self._port = f"{switch}-{name}", f"p{number}"
        self._switch = switch
        self.ranks: list[subprocess.Popen[str]] = []
        self.variables: dict[str, str] = {}  # of its own, for all that is started on it
        _ip("netns", "add", self.net)
        peer = ["peer", "name", self._port, "netns", switch]
        _ip("-n", self.net, "link", "add", "eth0", "type", "veth", *peer)
        _ip("-n", switch, "link", "set", self._port, "master", "bridge", "up")
        _ip("-n", self.net, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.net, "link", "set", "eth0", "up")
        _ip("-n", self.net, "link", "set", "lo", "up")
        script = f"hostname {name}; echo up; exec sleep infinity"
        unshare = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen(
            [*_DIE_WITH_US, "ip", "netns", "exec", self.net, *unshare, "sh", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.inner_pid = int(children.read_text().split()[0])  # number 1 inside

    def start(
        self,
        program: Sequence[str | os.PathLike[str]],
        variables: dict[str, str],
        output: IO[str] | int = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a rank: Python with the arguments `program`."""
        return self.start_any([sys.executable, *program], variables, output)

    def start_any(
        self,
        words: Sequence[str | os.PathLike[str]],
        variables: dict[str, str],
        output: IO[str] | int = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start any program; both its streams go to `output`, or to a pipe each."""
        enter = ["nsenter", f"--target={self.inner_pid}", "--net", "--uts", "--pid", "--mount"]
        rank = subprocess.Popen(
            [*enter, *words],
            env={**os.environ, **self.variables, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
        )
        self.ranks.append(rank)
        return rank

    def cut(self) -> None:
        """Cut the cable."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        """Mend the cable."""
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def listens(self, port: int) -> bool:
        """Tell whether a process of it listens at a port."""
        tables = [Path(f"/proc/{self.inner_pid}/net/{name}") for name in ("tcp", "tcp6")]
        lines = [line for table in tables for line in table.read_text().splitlines()[1:]]
        return any(
            fields[1].endswith(f":{port:04X}") and fields[3] == "0A"
            for fields in map(str.split, lines)
        )

    def inside(self) -> list[str]:
        """Return the command lines of all that runs on it, but for the one that holds it."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.net], capture_output=True, text=True, check=True
        )
        found: list[str] = []
        for pid in pids.stdout.split():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words and "sleep infinity" not in words:
                    found.append(f"{pid} {words}")
        return found

    def command(self, *words: str) -> list[str]:
        """Return the command that runs `words` in its network."""
        return [*_DIE_WITH_US, "ip", "netns", "exec", self.net, *words]

    def kill(self) -> None:
        """Kill all its processes at once, as a power failure would."""
        os.kill(self.inner_pid, signal.SIGKILL)  # who is number 1 takes all others along

    def remove(self) -> None:
        """Take everything away."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
        self._holder.kill()
        for process in (*self.ranks, self._holder):
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        _ip("netns", "del", self.net)


@contextlib.contextmanager
def hosts(count: int, name: str = "") -> Iterator[list[Host]]:
    """Make `count` hosts on one network, for the length of a `with` block.

    Args:
        count: How many.
        name: Tells networks apart that are there at the same time.
    """
    _sweep()
    switch = f"dure-{os.getpid()}{name}"
    made: list[Host] = []
    _ip("netns", "add", switch)
    try:
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number in range(count):
            made.append(Host("abcdefgh"[number], number, switch))
        yield made
    finally:
        for host in made:
            host.remove()
        _ip("netns", "del", switch)


def variables_of(made: Sequence[Host], ranks_each: int, key_file: Path) -> dict[str, str]:
    """Return the environment of a job whose rank 0, on the first host, has the store."""
    if not key_file.exists():
        key_file.write_bytes(os.urandom(32))
        key_file.chmod(0o600)
    return {
        "WORLD_SIZE": str(len(made) * ranks_each),
        "LOCAL_WORLD_SIZE": str(ranks_each),
        "MASTER_ADDR": made[0].address,
        "MASTER_PORT": str(PORT),
        "DURE_JOB_KEY_FILE": str(key_file),
        "OMP_NUM_THREADS": "1",
        "DURE_SILENCE": "2",
    }


def start_job(
    made: Sequence[Host],
    ranks_each: int,
    program: Sequence[str | os.PathLike[str]],
    key_file: Path,
    **variables: str,
) -> list[subprocess.Popen[str]]:
    """Start `ranks_each` ranks on every host, host by host; rank 0's host has the store."""
    world = variables_of(made, ranks_each, key_file) | variables
    return [
        host.start(program, {**world, "RANK": str(ranks_each * h + i), "LOCAL_RANK": str(i)})
        for h, host in enumerate(made)
        for i in range(ranks_each)
    ]
