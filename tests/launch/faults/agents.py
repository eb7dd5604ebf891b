"""Hosts for tests of restarts: each is a `dure run` of its own, which believes to be another host.

The program they run counts steps, in rank 0, and keeps the count in a file, its checkpoint; each
rank leaves a file that says that it was started, as what, and at which step. So a test sees every
round, and can kill by process number. The program ends when the test says so.
"""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.launch.procs.launching import Launching
from tests.waiting import PATIENCE_S, key_file, listening, until

PROGRAM = """\
import os
import pathlib
import sys
import time

folder = pathlib.Path(os.environ["CREW"])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
checkpoint, start = folder / "checkpoint", folder / f"starting {os.getpid()}"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
start.write_text(f"{os.getpid()} {step} {os.environ['DURE_STORE_ADDR']}")
start.rename(
    folder / f"start {os.environ['TORCHELASTIC_RESTART_COUNT']} {rank} {world}"
    f" {os.environ['DURE_HOST_ID']}"
)
while not (folder / "finish").exists():
    if rank == 0:
        step += 1
        (folder / "draft").write_text(str(step))
        (folder / "draft").rename(checkpoint)
    time.sleep(0.02)
    if (folder / f"fail {rank} {os.environ['TORCHELASTIC_RESTART_COUNT']}").exists():
        sys.exit(17)
"""


@dataclass(frozen=True)
class Start:
    """What a rank said when it was started."""

    round: int
    rank: int
    world_size: int
    host: str
    pid: int
    step: int
    store: str


@dataclass
class Host:
    """One `dure run`."""

    name: str
    process: subprocess.Popen[str]

    def end(self) -> int:
        """Return its exit code; its output is kept."""
        self.out, self.err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode


class Crew:
    """The hosts of one test, as jobs of `launching`, which looks whether anything is left."""

    def __init__(self, jobs: Launching, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.hosts: list[Host] = []
        self._jobs = jobs
        self._key = key_file(folder / "key")
        self._program = folder / "program.py"
        self._program.write_text(PROGRAM)

    def start(self, name: str, *flags: str) -> Host:
        """Start the launcher of one host of several."""
        return self.start_alone(name, *flags, "--rdzv-endpoint", f"127.0.0.1:{self.port}")

    def start_alone(self, name: str, *flags: str) -> Host:
        """Start the launcher of a host."""
        variables = {"DURE_HOST_ID": name, "DURE_JOB_KEY_FILE": str(self._key)}
        variables["CREW"] = str(self.folder)
        process = self._jobs.start(*flags, str(self._program), env=variables)
        host = Host(name, process)
        self.hosts.append(host)
        return host

    def wait_for_store(self) -> None:
        """Wait until a launcher coordinates at the endpoint."""
        self.wait_for(lambda: listening(self.port), "the coordinator")

    def starts(self) -> list[Start]:
        """Return what the ranks have said so far."""
        found: list[Start] = []
        for path in self.folder.glob("start *"):
            _, round, rank, world, host = path.name.split()
            pid, step, store = path.read_text().split()
            found.append(Start(int(round), int(rank), int(world), host, int(pid), int(step), store))
        return sorted(found, key=lambda start: (start.round, start.rank))

    def forget_starts(self) -> None:
        """Let the next job of these hosts begin with no file of the last one's ranks."""
        for path in self.folder.glob("start *"):
            path.unlink()

    def round(self, number: int, world_size: int) -> list[Start]:
        """Wait until all ranks of a round have started; return them by rank."""

        def there() -> bool:
            return len([s for s in self.starts() if s.round == number]) == world_size

        self.wait_for(there, f"round {number} of {world_size}")
        starts = [start for start in self.starts() if start.round == number]
        assert {start.world_size for start in starts} == {world_size}
        return starts

    def wait_for(self, done: Callable[[], object], what: str) -> None:
        """Wait for something to be true."""
        until(done, lambda: f"{what}: {self.starts()}{self._told()}")

    def step(self) -> int:
        """Return the checkpoint."""
        path = self.folder / "checkpoint"
        return int(path.read_text()) if path.exists() else 0

    def advance(self) -> int:
        """Wait until the program has made steps; return the last."""
        before = self.step()
        self.wait_for(lambda: self.step() > before + 2, "steps")
        return self.step()

    def finish(self) -> None:
        """Let the program end."""
        (self.folder / "finish").touch()

    def close(self) -> None:
        """Kill the launchers, and wait for their reapers to end all else."""
        for host in self.hosts:
            host.process.kill()
            host.process.communicate()
        self._jobs.wait_until_gone()

    def _told(self) -> str:
        for host in self.hosts:
            host.process.kill()
        said = [(host.name, *host.process.communicate()) for host in self.hosts]
        return "".join(f"\n--- {name}\n{out}{err}" for name, out, err in said)


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
