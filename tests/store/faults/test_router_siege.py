"""Long drills: a job of `dure run` goes on while its launcher's store is besieged.

The launcher may have 1024 descriptors, as on most machines; the attackers have 10,000 connections.
"""

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from dure.store import JobKey
from dure.store.key import mint
from dure.store.network import NetworkStore
from dure.store.tracker import MOST
from tests.launch.procs.launching import DURE, Launching
from tests.store.procs.wire_tools import connect, frame_header, greeting
from tests.waiting import PATIENCE_S, key_file, until

pytestmark = pytest.mark.slow

CONNECTIONS = 10_000
USUAL_DESCRIPTORS = 1024
PROGRAM = """
import os, pathlib, sys, time
import torch
import dure
stop, steps = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1] + ".steps")
with dure.process_group("gloo"):
    count, over = 0, torch.zeros(1)
    while not over:
        over += stop.exists()
        dure.all_reduce(over)
        count += 1
        if dure.get_rank() == 0:
            draft = steps.with_suffix(".new")
            draft.write_text(f"{count} {os.environ['DURE_STORE_ADDR']}")
            draft.rename(steps)
        time.sleep(0.01)
"""


@dataclass
class Besieged:
    """A job; how long each newcomer waited, and how much more memory its launcher has."""

    process: psutil.Process
    key: JobKey
    stop: Path
    waits: list[float] = field(default_factory=list[float])
    grown_mib: float = 0.0

    def steps(self) -> int:
        told = Path(f"{self.stop}.steps")
        return int(told.read_text().split()[0]) if told.exists() else 0

    @property
    def port(self) -> int:
        return int(Path(f"{self.stop}.steps").read_text().rpartition(":")[2])

    def newcomer(self) -> None:
        """Join as a rank would."""
        start = time.monotonic()
        place = f"tcp://127.0.0.1:{self.port}"
        store = NetworkStore(place, self.key, timedelta(seconds=PATIENCE_S))
        store.add("newcomers", 1)
        store.close()
        self.waits.append(time.monotonic() - start)


@contextmanager
def besieged(jobs: Launching) -> Iterator[Besieged]:
    """Yield a job that runs, and must go on, and end well."""
    folder, key = jobs.directory, mint()
    words = ["run", "--nproc", "2", "--key-file", str(key_file(folder / "key", key.raw))]
    limited = ("sh", "-c", f'ulimit -Sn {USUAL_DESCRIPTORS} && exec "$@"', "sh")
    stop, output = folder / "stop", folder / "output"
    command = [*limited, *DURE, *words, jobs.write(PROGRAM), str(stop)]
    process = jobs.start_any(*command, output=output)
    it = Besieged(psutil.Process(process.pid), key, stop)
    until(lambda: it.steps() > 2, output.read_text)
    before, steps = it.process.memory_info().rss, it.steps()
    it.newcomer()
    yield it
    it.newcomer()
    it.grown_mib = (it.process.memory_info().rss - before) / 2**20
    print(f"+{it.grown_mib:.1f} MiB; newcomers waited at most {max(it.waits):.3f} s")
    until(lambda: it.steps() > steps + 10, "ten steps")
    stop.touch()
    assert process.wait(PATIENCE_S) == 0, output.read_text()


def lines(jobs: Launching, what: str) -> int:
    text = (jobs.directory / "output").read_text()
    return sum(what in line for line in text.splitlines())


def test_ten_thousand_connections(job: Launching) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mine = min(CONNECTIONS + 500, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, mine), hard))
    try:
        with ExitStack() as held, besieged(job) as it:
            for i in range(mine - 500):
                stranger: socket.socket = held.enter_context(
                    connect(it.port, f"127.77.0.{1 + i % 200}")
                )
                if i % 3:
                    stranger.send(greeting()[: 1 + i % 64])
                if i % 1000 == 999:
                    it.newcomer()
                    assert it.process.num_fds() < MOST + 700
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert it.grown_mib < 64
    assert max(it.waits) < 5
    assert 1 <= lines(job, "refused") < 60


def test_a_gigabyte_of_noise(job: Launching) -> None:
    noise, sent = os.urandom(1 << 20), 0
    with besieged(job) as it:
        while sent < 1 << 30:
            with connect(it.port, "127.77.1.1") as stranger:
                try:
                    stranger.sendall(greeting() + frame_header(2 << 30, command=True))
                    for _ in range(100):
                        sent += len(noise)
                        stranger.sendall(noise)
                except OSError:
                    continue
    assert it.grown_mib < 32
    assert max(it.waits) < 5


def test_a_scan_that_goes_on_for_ten_seconds(job: Launching) -> None:
    end = time.monotonic() + 10
    with besieged(job) as it:
        while time.monotonic() < end:
            for _ in range(100):
                connect(it.port, "127.77.2.1").close()
            it.newcomer()
    assert it.grown_mib < 32
    assert max(it.waits) < 5
    assert 1 <= lines(job, "in the middle") <= 5
