"""The flight recorder of ranks that are processes: SIGUSR2 in a wait, and the file of each rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dure.launch import JobSpec, Line, run_job
from dure.trace.findings import study
from dure.trace.merging import read
from tests.trace.procs import flight_ranks


def shm(*values):
    return pytest.param(*values, marks=pytest.mark.needs("engine"))


@pytest.mark.parametrize(
    ("backend", "op"), [shm("shm", "all_reduce"), shm("shm", "recv"), ("gloo", "all_reduce")]
)
def test_sigusr2_shows_a_rank_of_2_that_waits(backend, op, process_pool, tmp_path):
    process_pool(2, backend).run(flight_ranks.look_at_rank_0, str(tmp_path), op)


@pytest.mark.parametrize("backend", [shm("shm"), "gloo"])
def test_the_records_of_3_ranks_match(backend, process_pool, tmp_path):
    paths = process_pool(3, backend).run(flight_ranks.dump_now, str(tmp_path))
    assert [Path(p).name for p in paths] == [f"rank{r}.json" for r in range(3)]
    files = read(tmp_path)
    found = study(files)
    assert files.problems == () and found.sentences == []
    assert {r.site.rpartition(":")[0] for f in files.ranks.values() for r in f.records} == {
        flight_ranks.__file__
    }
    for rank, file in files.ranks.items():
        world = [r for r in file.records if len(r.group) and not r.is_message and r.world_size == 3]
        asynchronous = [r.async_op for r in world if r.op == "all_reduce"]
        assert asynchronous[-2:] == [False, True]
        reduced = [r for r in world if r.op == "all_reduce"][-1]
        assert (reduced.dtype, reduced.nbytes, reduced.reduction) == ("float32", 32, "SUM")
        assert 0 < reduced.start_ns <= reduced.end_ns
        messages = [(r.op, r.peer, r.tag) for r in file.records if r.is_message]
        assert messages == [[("send", 1, 4)], [("recv", 0, 4)], []][rank]
        small = [r for r in file.records if r.world_size == 2]
        assert [r.op for r in small] == (["broadcast"] if rank < 2 else [])


def test_dure_run_leaves_the_records_of_a_failed_job(tmp_path):
    program = tmp_path / "prog.py"
    program.write_text(
        "import torch, dure as dist\n"
        "with dist.process_group():\n"
        "    dist.barrier()\n"
        "    if dist.get_rank() == 1:\n"
        "        open('/no/such')\n"
        "    dist.all_reduce(torch.ones(4))\n"
    )
    lines: list[Line] = []
    traces = tmp_path / "traces"
    spec = JobSpec(
        program=str(program),
        nproc=3,
        trace_dir=traces,
        on_line=lines.append,
        quiet=True,
        env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    result = run_job(spec)
    assert result.first_failure is not None and result.first_failure.rank == 1
    flight = read(traces)
    assert list(flight.ranks) == [0, 1, 2]
    assert flight.ranks[1].failure.startswith("FileNotFoundError: ")
    assert {f.job for f in flight.ranks.values()} == {flight.ranks[0].job}
    told = b"\n".join(line.text for line in lines)
    assert b"Flight record: " in told and b"dure trace merge" in told
