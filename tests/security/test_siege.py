"""Long drills: a job of `dure run` goes on while its launcher's store is besieged.

The launcher may have 1024 descriptors, as on most machines; the attackers have 10,000 connections.
"""

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from dure.store import JobKey
from dure.store.key import mint
from dure.store.network import NetworkStore
from dure.store.tracker import MOST
from security.wire_tools import connect, frame_header, greeting
from waiting import PATIENCE_S, key_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONNECTIONS = 10_000
USUAL_DESCRIPTORS = 1024
PROGRAM = """
import os, sys, time
import torch
import dure
with dure.process_group("gloo"):
    print("STORE", os.environ["DURE_STORE_ADDR"], flush=True)
    steps, over = 0, torch.zeros(1)
    while not over:
        over += os.path.exists(sys.argv[1])
        dure.all_reduce(over)
        steps += 1
        if dure.get_rank() == 0:
            with open(sys.argv[1] + ".new", "w") as file:
                file.write(str(steps))
            os.replace(sys.argv[1] + ".new", sys.argv[1] + ".steps")
        time.sleep(0.01)
"""


@dataclass
class Job:
    process: psutil.Process
    port: int
    key: JobKey
    stop: Path

    def steps(self) -> int:
        told = Path(f"{self.stop}.steps")
        return int(told.read_text()) if told.exists() else 0

    def newcomer(self) -> float:
        """Join as a rank would; returns how long that took."""
        start = time.monotonic()
        place = f"tcp://127.0.0.1:{self.port}"
        store = NetworkStore(place, self.key, timedelta(seconds=PATIENCE_S))
        store.add("newcomers", 1)
        store.close()
        return time.monotonic() - start


@contextmanager
def job(folder: Path) -> Iterator[Job]:
    key = mint()
    key_file(folder / "key", key.raw)
    (folder / "program.py").write_text(PROGRAM)
    stop = folder / "stop"

    with (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            [
                *("sh", "-c", f'ulimit -Sn {USUAL_DESCRIPTORS} && exec "$@"', "sh"),
                *(sys.executable, "-m", "dure.cli", "run", "--nproc", "2"),
                *("--key-file", str(folder / "key"), str(folder / "program.py"), str(stop)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=err,
        )
    assert process.stdout is not None
    try:
        port = 0
        while not port:
            text = process.stdout.readline().decode()
            assert text or process.poll() is None, (folder / "err").read_text()
            if "STORE" in text:
                port = int(text.rpartition(":")[2])
        it = Job(psutil.Process(process.pid), port, key, stop)
        while it.steps() < 3:
            time.sleep(0.01)
        yield it
        stop.touch()
        assert process.wait(PATIENCE_S) == 0, (folder / "err").read_text()
    finally:
        process.kill()
        process.communicate()


def test_ten_thousand_connections(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mine = min(CONNECTIONS + 500, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, mine), hard))
    held: list[socket.socket] = []
    try:
        with job(tmp_path) as it:
            before, steps = it.process.memory_info().rss, it.steps()
            waits = [it.newcomer()]
            for i in range(mine - 500):
                stranger = connect(it.port, f"127.77.0.{1 + i % 200}")
                held.append(stranger)
                if i % 3:
                    stranger.send(greeting()[: 1 + i % 64])
                if i % 1000 == 999:
                    waits.append(it.newcomer())
                    assert it.process.num_fds() < MOST + 700
            waits.append(it.newcomer())
            grown = (it.process.memory_info().rss - before) / 2**20
            print(f"{len(held)} connections; +{grown:.1f} MiB; newcomers waited {waits}")
            assert grown < 64
            assert max(waits) < 5
            assert it.steps() > steps + 10
    finally:
        for each in held:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    told = [text for text in (tmp_path / "err").read_text().splitlines() if "refused" in text]
    assert 1 <= len(told) < 60


def test_a_gigabyte_of_noise(tmp_path: Path) -> None:
    noise = os.urandom(1 << 20)
    with job(tmp_path) as it:
        before, steps = it.process.memory_info().rss, it.steps()
        sent = 0
        while sent < 1 << 30:
            with connect(it.port, "127.77.1.1") as stranger:
                try:
                    stranger.sendall(greeting() + frame_header(2 << 30, command=True))
                    for _ in range(100):
                        sent += len(noise)
                        stranger.sendall(noise)
                except OSError:
                    continue
        grown = (it.process.memory_info().rss - before) / 2**20
        print(f"+{grown:.1f} MiB")
        assert grown < 32
        assert it.newcomer() < 5
        assert it.steps() > steps


def test_a_scan_that_goes_on_for_ten_seconds(tmp_path: Path) -> None:
    with job(tmp_path) as it:
        before, steps, end = it.process.memory_info().rss, it.steps(), time.monotonic() + 10
        scans, waits = 0, [0.0]
        while time.monotonic() < end:
            for _ in range(100):
                connect(it.port, "127.77.2.1").close()
                scans += 1
            waits.append(it.newcomer())
        grown = (it.process.memory_info().rss - before) / 2**20
        print(f"{scans} scans; +{grown:.1f} MiB; newcomers waited at most {max(waits):.3f} s")
        assert grown < 32
        assert max(waits) < 5
        assert it.steps() > steps + 10
    told = [text for text in (tmp_path / "err").read_text().splitlines() if "in the middle" in text]
    assert 1 <= len(told) <= 5
