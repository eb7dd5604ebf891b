"""Two hundred jobs in each of which a rank is killed at a random moment.

Whatever that moment is (the interpreter starts, torch is imported, the ranks meet, a collective
runs, the job is ending), the job ends by itself, with the killed rank's exit code, and nothing
remains of it: no process, no file, no shared memory.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from procs.launching import Launching, launching, living

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BLOCKS = 4
RUNS_OF_A_BLOCK = 50

LIGHT = """
    import os, subprocess, sys, time
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    for _ in range(int(sys.argv[1])):
        print("working")
        time.sleep(0.01)
    child.kill()
    child.wait()
"""
COLLECTIVES = """
    import sys
    import torch
    import dure as dist
    dist.init_process_group()
    for step in range(int(sys.argv[1])):
        total = torch.ones(10_000)
        dist.all_reduce(total)
        assert total[0] == dist.get_world_size()
    print("working")
    dist.destroy_process_group()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launching]:
    yield from launching(tmp_path)


def find_rank(job: Launching, rank: int) -> int | None:
    """Return the process of one rank, if it has been started and not ended."""
    mine = set(job.left())
    for pid in living(f"\0RANK={rank}\0"):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid in mine and (b"child.py" in command or b"forking.py" in command):
                return pid
    return None


def kill_someone(job: Launching, moment_s: float, rank: int, launcher_lives: object) -> bool:
    """Kill a rank `moment_s` from now, or as soon as it exists; False if it ended before."""
    due = time.monotonic() + moment_s
    while time.monotonic() < due + 30:
        time.sleep(max(0.0, min(0.01, due - time.monotonic())))
        if time.monotonic() < due:
            continue
        if launcher_lives() is not None:  # pyright: ignore
            return False
        pid = find_rank(job, rank)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
    return False


def drill(job: Launching, arguments: tuple[str, ...], seed: int, longest_s: float) -> int:
    """Run one block; return how many jobs had a rank killed."""
    chance = random.Random(seed)
    before = sorted(os.listdir(job.directory))
    kills = 0
    for run in range(RUNS_OF_A_BLOCK):
        process = job.start("-n", "2", *arguments, env={"HOME": str(job.directory)})
        moment_s = chance.uniform(0, longest_s)
        killed = kill_someone(job, moment_s, chance.randrange(2), process.poll)
        done = job.finish(process)  # checks that no process is left
        note = (run, moment_s, killed, done)
        assert done.code in ((137, 0) if killed else (0,)), note
        assert done.elapsed_s < 10, note
        assert sorted(os.listdir(job.directory)) == before, note
        kills += done.code == 137
    return kills


@pytest.mark.parametrize("block", range(BLOCKS))
def test_light_job_with_a_killed_rank_leaves_nothing(job: Launching, block: int) -> None:
    program = job.write(LIGHT)
    assert drill(job, (program, "50"), seed=block, longest_s=1.0) > RUNS_OF_A_BLOCK // 4


@pytest.mark.parametrize("block", range(BLOCKS))
def test_collectives_with_a_killed_rank_leave_nothing(job: Launching, block: int) -> None:
    program = job.write(COLLECTIVES)
    kills = drill(job, (program, "20000"), seed=100 + block, longest_s=4.0)
    assert kills > RUNS_OF_A_BLOCK // 4


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_launcher_signalled_at_a_random_moment_leaves_nothing(
    job: Launching, number: int, code: int
) -> None:
    program = job.write(LIGHT)
    chance = random.Random(number)
    before = sorted(os.listdir(job.directory))
    for run in range(RUNS_OF_A_BLOCK):
        process = job.start("-n", "2", program, "1000")
        moment_s = chance.uniform(0, 1.5)
        time.sleep(moment_s)
        process.send_signal(number)
        process.communicate(timeout=100)
        deadline = time.monotonic() + 60
        while job.left() and time.monotonic() < deadline:
            os.sched_yield()
        note = (run, moment_s, process.returncode)
        assert job.left() == [], note
        starting = (-number, 1)  # what the interpreter answers before a line of ours has run
        assert process.returncode in (code, *starting), note
        assert sorted(os.listdir(job.directory)) == before, note
