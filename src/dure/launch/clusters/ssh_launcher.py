"""The ssh launcher of a job on several hosts: it starts agents, and shows what they write.

ClusterShell's event loop runs one ssh a host, all at once; a host that is this machine gets its
agent without ssh. The ssh launcher itself has no part in the job: it hands out the key, passes
signals on, writes the agents' lines as they come (each has its host and rank in front already), and
ends with the exit code of the first host that failed. Agents agree among themselves on what a dead
rank means; it steps in where they cannot: it names a host that cannot be reached, and ends the
others.

When it dies, however it dies, its ends of the agents' standard inputs close, and the agents end
(`dure.launch.clusters.control_stream`).
"""

from __future__ import annotations

import math
import shlex
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dure.launch.clusters.commands import HostsJob, first_lines, host_command
from dure.launch.clusters.hosts import cluster_shell
from dure.launch.clusters.meeting import is_this_host
from dure.store.silence import silence_s

__all__ = ["run_on_hosts"]

_TICK_S = 0.1
_FOLLOW_S = 6.0
"""How long the other hosts have to end by themselves after the first failure."""

_KILL_S = 8.0
"""From asking agents to end to cutting their connections."""

_PROBES = 6
"""How often ssh asks a host that is silent whether it is there, before it gives up."""

_SSH_FAILED = 255
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run_on_hosts(job: HostsJob, key: bytes) -> int:
    """Run a job on its hosts; return the exit code of the first that failed, or 0.

    Raises:
        UsageError: ClusterShell is missing, or a variable cannot be handed on.

    Threads: on the main thread, for signals are handled there.
    """
    task = cluster_shell("Task").task_self()
    task.set_info("fanout", max(64, len(job.hosts)))
    task.set_info("ssh_options", shlex.join(_ssh_words(job)))
    launcher = _SshLauncher(job, task, first_lines(job, key))
    with _caught(launcher.signals):
        launcher.start()
        task.resume()
    return launcher.exit_code


def _ssh_words(job: HostsJob) -> list[str]:
    """Return options for ssh; the first of two that contradict each other counts."""
    words = [*job.ssh_options, "-T", "-oConnectTimeout=10"]
    interval_s = max(1, silence_s() // _PROBES)
    count = math.ceil(silence_s() / interval_s)
    return [*words, f"-oServerAliveInterval={interval_s}", f"-oServerAliveCountMax={count}"]


class _SshLauncher:
    """The hosts of a job while it runs. ClusterShell calls the methods that begin with `ev_`."""

    def __init__(self, job: HostsJob, task: Any, lines: bytes) -> None:
        self._job, self._task, self._lines = job, task, lines
        self._agents: dict[Any, str] = {}
        self._words: dict[str, deque[str]] = {}
        self._ended: set[str] = set()
        self._first: tuple[str, int] | None = None
        self._interrupted: int | None = None
        self._asked_s: float | None = None
        self._failed_s: float | None = None
        self._now_s = 0.0
        self.signals: list[int] = []

    @property
    def exit_code(self) -> int:
        """The first failing host's, or 128 + the signal that ended the job."""
        if self._interrupted is not None:
            return 128 + self._interrupted
        return self._first[1] if self._first is not None else 0

    def start(self) -> None:
        for number, slots in enumerate(self._job.hosts):
            command = host_command(self._job, number)
            nodes = {} if is_this_host(slots.host) else {"nodes": slots.host}
            agent = self._task.shell(command, handler=self, stderr=True, stdin=True, **nodes)
            self._agents[agent] = slots.host
            self._words[slots.host] = deque(maxlen=4)
            agent.write(self._lines)
        self._task.timer(_TICK_S, handler=self, interval=_TICK_S, autoclose=True)

    def _ignore(self, *_: object) -> None:
        """Nothing needs doing when ssh has started, or a stream is written or closed."""

    ev_start = ev_pickup = ev_written = ev_close = _ignore

    def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
        """Write a line as it came; remember the last errors, for ssh may have said them."""
        stream = sys.stderr if sname == "stderr" else sys.stdout
        if sname == "stderr":
            self._words[self._agents[worker]].append(msg.decode(errors="replace"))
        stream.buffer.write(msg + b"\n")
        stream.buffer.flush()

    def ev_hup(self, worker: Any, node: str, rc: int) -> None:
        host = self._agents[worker]
        self._ended.add(host)
        if rc == 0 or self._first is not None:
            return
        self._first = (host, rc)
        self._failed_s = self._now_s
        if self._interrupted is not None:
            return
        said = " / ".join(line.strip() for line in self._words[host] if line.strip())
        trouble = self._trouble(host, rc, said)
        if trouble:
            _say(f"host {host} {trouble}: {said or 'ssh said nothing'}")
            self._ask_all("SIGTERM")

    def _trouble(self, host: str, rc: int, said: str) -> str:
        """Say what kept an agent from its work, if it was no rank's failure."""
        if rc == _SSH_FAILED and not is_this_host(host):
            return "cannot be reached, or was lost"
        if rc in (126, 127) and "/bin/sh:" in said:
            return f"cannot start {self._job.python} (see --remote-python)"
        if rc == 2 and "/bin/sh:" in said:
            return f"has no directory {self._job.directory}"
        if "No module named" in said and "dure" in said.partition("No module named")[2][:10]:
            return f"has no Dure in {self._job.python} (see --remote-python)"
        return ""

    def ev_timer(self, timer: Any) -> None:
        """Pass signals on; end those that should have ended by themselves."""
        self._now_s += _TICK_S
        while self.signals:
            number = self.signals.pop(0)
            if number not in (signal.SIGUSR1, signal.SIGUSR2):
                self._interrupted = self._interrupted or number
            self._ask_all(signal.Signals(number).name)
        late = self._failed_s is not None and self._now_s - self._failed_s > _FOLLOW_S
        if late and self._asked_s is None:
            _say(f"ending the hosts that still run: {', '.join(sorted(self._running()))}")
            self._ask_all("SIGTERM")
        if self._asked_s is not None and self._now_s - self._asked_s > _KILL_S:
            self._task.abort()

    def _running(self) -> set[str]:
        return set(self._agents.values()) - self._ended

    def _ask_all(self, name: str) -> None:
        """Send a signal to every agent that runs; one that ends a job ends the stream, too."""
        ends = name not in ("SIGUSR1", "SIGUSR2")
        if ends and self._asked_s is None:
            self._asked_s = self._now_s
        for agent, host in self._agents.items():
            if host not in self._ended:
                agent.write(f"{name}\n".encode())


@contextmanager
def _caught(signals: list[int]) -> Iterator[None]:
    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(f"[dure] {text}", file=sys.stderr, flush=True)
