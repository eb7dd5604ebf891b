"""Two builds in one job: all ranks are refused at once, whoever started them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.procs.launching import Launching
from tests.waiting import key_file

ODD = "9.8.7"

MEET = f"""
from dure import version
from dure.errors import RendezvousError
from dure.placement import detect
from dure.env import everything
from dure.store.rendezvous import rendezvous

rank = detect(everything()).member.rank
if rank == 1:
    version.VERSION = "{ODD}"
try:
    rendezvous()
except RendezvousError as error:
    assert error.what == "the ranks run different builds of Dure", error
    print(f"{{rank}} refused: {{error.seen}}", flush=True)
"""


@pytest.fixture
def job(tmp_path: Path):
    made = Launching(tmp_path)
    try:
        yield made
    finally:
        assert made.kill() == []


def start(job: Launching, way: str, port: int) -> list:
    program = job.write(MEET)
    secret = {"DURE_JOB_KEY_FILE": str(key_file(job.directory / "key"))}
    if way == "dure run":
        return [job.start("--nproc", "2", "--prefix", "none", program)]
    named = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **secret}
    ranks = [{"RANK": str(rank), "DURE_HOST_ID": f"h{rank}", **named} for rank in range(2)]
    return [job.start_any(sys.executable, program, env=rank) for rank in ranks]


@pytest.mark.parametrize("way", ["dure run", "four variables"])
def test_ranks_of_two_builds_are_refused_with_both_named(job: Launching, way: str, port: int):
    ended = job.finish_all(*start(job, way, port))
    assert [each.code for each in ended] == [0] * len(ended), ended
    refused = [line for each in ended for line in each.out.splitlines() if "refused" in line]
    assert len(refused) == 2, ended
    for line in refused:
        assert f"{ODD} (protocol " in line
        assert "rank 0 (pid " in line
        assert "rank 1 (pid " in line
    if way == "four variables":
        assert " on h0" in refused[0]
        assert " on h1" in refused[0]
