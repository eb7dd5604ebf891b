"""Hundreds of jobs of which a rank, or the launcher, is ended at a random moment.

Whatever that moment is (the interpreter starts, torch is imported, the ranks meet, a collective
runs, the job is ending), the job ends by itself, with the exit code that follows, and nothing
remains of it: no process, no file, no shared memory.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.procs.launching import Launching, living
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RUNS = 100

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


def kill_rank(job: Launching, launcher: subprocess.Popen[str], rank: int) -> bool:
    """Kill a rank, as soon as it exists; False if the job ended before."""
    while launcher.poll() is None:
        mine = set(job.left())
        for pid in living(f"\0RANK={rank}\0"):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if pid in mine and (b"child.py" in command or b"forking.py" in command):
                    os.kill(pid, signal.SIGKILL)
                    return True
    return False


@pytest.mark.parametrize(
    ("program", "steps", "longest_s"), [(LIGHT, "50", 1.0), (COLLECTIVES, "20000", 2.0)]
)
def test_job_with_a_killed_rank_leaves_nothing(
    job: Launching, program: str, steps: str, longest_s: float
) -> None:
    path, chance, kills = job.write(program), random.Random(steps), 0
    before = sorted(os.listdir(job.directory))
    for run in range(RUNS):
        process = job.start("-n", "2", path, steps, env={"HOME": str(job.directory)})
        moment_s = chance.uniform(0, longest_s)
        time.sleep(moment_s)
        killed = kill_rank(job, process, chance.randrange(2))
        done = job.finish(process)  # checks that no process is left
        note = (run, moment_s, killed, done)
        assert done.code in ((137, 0) if killed else (0,)), note
        assert sorted(os.listdir(job.directory)) == before, note
        kills += done.code == 137
    assert kills > RUNS // 4


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_launcher_signalled_at_a_random_moment_leaves_nothing(
    job: Launching, number: int, code: int
) -> None:
    program, chance = job.write(LIGHT), random.Random(number)
    before = sorted(os.listdir(job.directory))
    for run in range(RUNS // 2):
        process = job.start("-n", "2", program, "1000")
        moment_s = chance.uniform(0, 1.5)
        time.sleep(moment_s)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
        note = (run, moment_s, process.returncode)
        until(lambda: not job.left(), f"the end of all: {note}")
        starting = (-number, 1)  # what the interpreter answers before a line of ours has run
        assert process.returncode in (code, *starting), note
        assert sorted(os.listdir(job.directory)) == before, note
