"""The flight recorder of ranks that are processes: SIGUSR2 in a wait, and the file of each rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import dure as dist
from dure import trace
from dure.launch import JobSpec, Line, run_job
from dure.trace.events import State
from dure.trace.findings import study
from dure.trace.merging import read
from tests.waiting import until


def look_at_rank_0(rank: int, folder: str, op: str) -> None:
    """Rank 0 waits in `op`; rank 1 signals it until its file shows that it does."""
    os.environ["DURE_TRACE_DIR"] = folder
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        _signal_until_it_waits(pids[0], Path(folder, "rank0.json"), op)
    if op == "recv":
        (dist.recv if rank == 0 else dist.send)(torch.ones(4), 1 - rank)
    else:
        dist.all_reduce(torch.ones(4))
    dist.barrier()


def _signal_until_it_waits(pid: int, file: Path, op: str) -> None:
    def waits() -> bool:
        os.kill(pid, signal.SIGUSR2)
        until(file.exists, "a file for the signal")
        content = json.loads(file.read_text())
        file.unlink()
        last = content["records"][-1]
        if (last["op"], last["state"]) != (op, "started"):
            return False
        assert content["reason"] == "SIGUSR2" and last["file"] == __file__
        functions = [f["function"] for f in content["threads"][0]["stack"]]
        assert "look_at_rank_0" in functions, functions
        return True

    until(waits, f"rank 0 waiting in {op}")


def dump_now(rank: int, folder: str) -> str:
    """Do something of each kind, and write it down."""
    t = torch.ones(8)
    dist.all_reduce(t)
    work = dist.all_reduce(t, async_op=True)
    assert work is not None
    work.wait()
    if rank == 0:
        dist.send(t, 1, tag=4)
    if rank == 1:
        dist.recv(t, 0, tag=4)
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.broadcast(t, 0, group)
        dist.destroy_process_group(group)
    dist.barrier()
    return str(trace.dump(folder))


def shm(*values):
    return pytest.param(*values, marks=pytest.mark.needs("engine"))


@pytest.mark.parametrize(
    ("backend", "op"), [shm("shm", "all_reduce"), shm("shm", "recv"), ("gloo", "all_reduce")]
)
def test_sigusr2_shows_a_rank_of_2_that_waits(backend, op, process_pool, tmp_path):
    process_pool(2, backend).run(look_at_rank_0, str(tmp_path), op)


@pytest.mark.parametrize("backend", [shm("shm"), "gloo"])
def test_the_records_of_3_ranks_match(backend, process_pool, tmp_path):
    paths = process_pool(3, backend).run(dump_now, str(tmp_path))
    assert [Path(p).name for p in paths] == [f"rank{r}.json" for r in range(3)]
    files = read(tmp_path)
    found = study(files)
    assert files.problems == () and found.sentences == []
    lines = Path(__file__).read_text().splitlines()
    for record in (record for file in files.ranks.values() for record in file.records):
        place, _, line = record.site.rpartition(":")
        assert (place, record.function) == (__file__, "dump_now")
        assert record.op.removesuffix("_single") in lines[int(line) - 1]
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


def test_ranks_of_a_hang_that_the_launcher_ends_leave_their_records(tmp_path: Path) -> None:
    program, asked = tmp_path / "prog.py", tmp_path / "asked"
    program.write_text(
        "import signal, time, torch, dure as dist\n"
        f"signal.signal(signal.SIGUSR2, lambda *_: open('{asked}', 'w'))\n"
        "with dist.process_group():\n"
        "    dist.barrier()\n"
        "    if dist.get_rank() == 1:\n"
        "        time.sleep(600)\n"
        "    dist.all_reduce(torch.ones(4))\n"
    )
    traces = tmp_path / "traces"
    spec = JobSpec(
        program=str(program),
        nproc=2,
        trace_dir=traces,
        hang_timeout_s=1.0,
        quiet=True,
        env={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    result = run_job(spec)
    assert result.first_failure is not None and result.first_failure.rank == 1
    flight = read(traces)
    assert list(flight.ranks) == [0, 1]
    assert {f.reason for f in flight.ranks.values()} == {"a hang, which the launcher ends"}
    assert [(r.op, r.state) for r in flight.ranks[0].records][-1] == ("all_reduce", State.STARTED)
    assert [(r.op, r.state) for r in flight.ranks[1].records][-1] == ("barrier", State.SUCCEEDED)
    assert not asked.exists()  # SIGUSR2 is the program's own
