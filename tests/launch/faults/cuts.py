"""Jobs over hosts whose network is cut: each host is a network namespace with a `dure run` in it.

A `Cutting` starts the launchers, spoils the network, and reads the ledger of the job's program
(`procs/programs/cut_job.py`) for who trained when.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.comm import namespace_hosts as namespaces
from tests.launch.procs.launching import Launching
from tests.waiting import PATIENCE_S, key_file, until

PROGRAM = Path(__file__).parents[1] / "procs" / "programs" / "cut_job.py"
PORT = 29400


@dataclass(frozen=True, slots=True)
class Step:
    """A line of the ledger."""

    at: float  # s, of the machine's monotonic clock
    host: str
    group: str
    step: int
    size: int


@dataclass(frozen=True)
class Launcher:
    """One `dure run`, on one host, and the file with all that it has printed."""

    host: namespaces.Host
    process: subprocess.Popen[str]
    output: Path

    def end(self) -> int:
        """Return its exit code."""
        return self.process.wait(PATIENCE_S)

    @property
    def text(self) -> str:
        """All that it has printed so far."""
        return self.output.read_text()


class Cutting:
    """A job on hosts whose network can be cut."""

    def __init__(self, made: list[namespaces.Host], jobs: Launching) -> None:
        self.hosts, self.folder, self._jobs = made, jobs.directory, jobs
        self.key = key_file(self.folder / "key")
        self.launchers: list[Launcher] = []

    def start(self, *flags: str, words: tuple[str, ...] = ()) -> None:
        """Start a launcher on every host; the first has the endpoint."""
        for host in self.hosts:
            self._start_on(host, *flags, words=words)
            self.wait_for(lambda: self.hosts[0].listens(PORT), "the store")

    def _start_on(self, host: namespaces.Host, *flags: str, words: tuple[str, ...]) -> None:
        output = self.folder / f"{len(self.launchers)}-{host.name}.txt"
        endpoint = f"{self.hosts[0].address}:{PORT}"
        variables = {"DURE_JOB_KEY_FILE": str(self.key), "CREW": str(self.folder)}
        variables |= {"DURE_TEST_HOST": host.name, "OMP_NUM_THREADS": "1", "DURE_SILENCE": "4"}
        with output.open("w") as file:
            process = self._jobs.start_on(
                host,
                *flags,
                "--rdzv-endpoint",
                endpoint,
                PROGRAM,
                *words,
                env=variables,
                output=file,
            )
        self.launchers.append(Launcher(host, process, output))

    # ---- what happened -------------------------------------------------------------------------

    def ledger(self) -> list[Step]:
        """Return the steps so far, in the order of time."""
        path = self.folder / "ledger"
        lines = path.read_text().splitlines() if path.exists() else []
        words = [line.split() for line in lines]
        steps = [Step(int(a) / 1e9, h, g, int(s), int(n)) for a, h, g, s, n in words]
        return sorted(steps, key=lambda step: step.at)

    def wait_for(self, done: Callable[[], object], what: str) -> None:
        """Wait for something to be true."""
        until(done, lambda: f"{what}\n{self.report()}")

    def trains(self, size: int, after: float = 0.0) -> str:
        """Wait until a group of `size` ranks has made steps; return the host that leads it."""

        def found() -> list[Step]:
            return [s for s in self.ledger() if s.size == size and s.at > after]

        self.wait_for(lambda: len(found()) > 2, f"{size} ranks that train")
        return found()[-1].host

    def led_by(self, after: float) -> set[str]:
        """Return the hosts that have led a group since a moment."""
        return {step.host for step in self.ledger() if step.at > after}

    def finish(self) -> None:
        """Let the program end."""
        (self.folder / "finish").touch()

    def check_one_at_a_time(self) -> None:
        """No two groups ever trained at the same time."""
        order = list(dict.fromkeys(step.group for step in self.ledger()))
        spans = [[s.at for s in self.ledger() if s.group == group] for group in order]
        for group, before, after in zip(order[1:], spans, spans[1:], strict=False):
            assert before[-1] < after[0], (
                f"{group} began before the last had ended\n{self.report()}"
            )

    def check_nothing_left(self) -> None:
        """No process of the job is left on any host."""
        self.wait_for(lambda: not self._jobs.left(), "all processes to end")

    def report(self) -> str:
        """Tell all."""
        out = [f"now {time.monotonic():.2f}"]
        groups = dict.fromkeys(step.group for step in self.ledger())
        for group in groups:
            steps = [s for s in self.ledger() if s.group == group]
            out.append(
                f"{steps[0].at:.2f} to {steps[-1].at:.2f}: {group} on {steps[0].host}, "
                f"{steps[0].size} ranks, steps {steps[0].step} to {steps[-1].step}"
            )
        for launcher in self.launchers:
            code = launcher.process.poll()
            out.append(f"--- {launcher.host.name}, exit code {code}\n{launcher.text}")
        return "\n".join(out)


@contextlib.contextmanager
def cutting(count: int, folder: Path) -> Iterator[Cutting]:
    """Make `count` hosts on a network that can be cut; what runs there ends with them."""
    jobs = Launching(folder)
    with namespaces.hosts(count, "cut") as made:
        yield Cutting(made, jobs)
    jobs.kill()
