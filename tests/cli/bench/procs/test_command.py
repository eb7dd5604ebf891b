"""`dure bench` for real: every operation right, rivals beside it, clear refusals, nothing left."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from dure.cli.app import run_command_line
from dure.cli.bench.group import Contestant, Group, GroupFailed
from dure.cli.bench.measure import measure
from dure.cli.bench.plan import OPERATIONS
from dure.cli.bench.results import Report, read_report
from tests.cli.bench.bench_sample import PLAN
from tests.launch.procs.launching import DURE, living
from tests.needs import why_missing
from tests.waiting import PATIENCE_S, until

QUICK = ("--ranks", "2", "--samples", "2", "--sample-time", "0.001")
MPI = not why_missing("MPI")
SHM = Contestant(role=("dure", "shm"))
TAG = uuid.uuid4().hex
"""Of every process that is started here, in its environment."""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    try:
        until(lambda: not living(f"BENCH_TEST={TAG}"), "the end of all processes")
    finally:
        for pid in living(f"BENCH_TEST={TAG}"):
            os.kill(pid, signal.SIGKILL)


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    environment = os.environ | {"BENCH_TEST": TAG} | variables
    return subprocess.Popen(
        [*DURE, "bench", *words], stdout=pipe, stderr=pipe, text=True, env=environment
    )


def test_every_operation_is_measured_and_right_beside_its_rivals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json = tmp_path / "figures.json"
    rivals = ["gloo", "mpi"] if MPI else ["gloo"]
    words = ("--op", "all", "--sizes", "4,12K", "--against", ",".join(rivals), *QUICK)
    process = start(*words, "--json", str(json))
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    report = read_report(json.read_bytes(), "figures")
    assert report.contestants[:2] == ["dure shm", "gloo"]
    assert list(report.versions)[:4] == ["dure", "commit", "python", "torch"]
    assert all(report.versions.values())
    measured = {(cell.op, cell.contestant) for cell in report.cells}
    assert len(measured) == len(OPERATIONS) * (1 + len(rivals))
    for cell in report.cells:
        assert (len(cell.samples_s), cell.wrong) == (2, 0), cell
    assert "reduce_scatter (sum), float32, 2 ranks: dure shm" in out
    assert run_command_line(["bench", "--from", str(json)]) == 0
    assert capsys.readouterr().out.strip() == out.strip()


def test_wrong_results_make_the_command_fail_and_right_ones_of_other_kinds_do_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'dure.cli.bench.rank' in sys.argv or any('child.py' in a for a in sys.orig_argv):\n"
        "    from dure.comm.group import ProcessGroup\n"
        "    whole = ProcessGroup.all_reduce\n"
        "    def off_by_one(self, tensor, *rest, **named):\n"
        "        work = whole(self, tensor, *rest, **named)\n"
        "        tensor[-1] += 1\n"
        "        return work\n"
        "    ProcessGroup.all_reduce = off_by_one\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    broken = start("--sizes", "64", *QUICK, PYTHONPATH=path)
    words = ("--op", "all_reduce,reduce_scatter,all_to_all", "--dtype", "bfloat16,int8")
    other = ("--sizes", "1000", "--arena", "--redop", "max", "--markdown", *QUICK)
    right = start(*words, *other)
    out, err = broken.communicate(timeout=PATIENCE_S)
    assert broken.returncode == 1, (out, err)
    assert "4 wrong elements" in err
    out, err = right.communicate(timeout=PATIENCE_S)
    assert right.returncode == 0, err
    assert out.count("| 0 |") == 6  # a table for each operation and type


def test_interrupted_or_killed_leaves_no_process() -> None:
    words = ("--sizes", "8", "--ranks", "2", "--samples", "100000")
    ended = {number: start(*words) for number in (signal.SIGINT, signal.SIGKILL)}

    def has_ranks(process: subprocess.Popen[str]) -> bool:
        assert process.poll() is None
        known = psutil.Process(process.pid).net_connections("unix")
        return sum("dure-bench-" in str(each.laddr) for each in known) == 3  # one listens

    until(lambda: all(map(has_ranks, ended.values())), "two ranks of each")
    for number, process in ended.items():
        process.send_signal(number)
    for process in ended.values():
        process.communicate(timeout=PATIENCE_S)
    assert ended[signal.SIGINT].returncode == 130


def test_rival_that_cannot_start_is_left_out_and_ours_is_fatal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def report() -> Report:
        return Report(command="", when="", machine={}, versions={}, plan=PLAN)

    bad, told, console = Contestant(role=("dure", "smoke")), report(), Console()
    measure(PLAN, [SHM, bad], told, console)
    assert told.contestants == ["dure shm"]
    assert len(told.cells) == 2
    assert capsys.readouterr().err.count("dure bench: note: ") == 1
    worse = Contestant(role=(), program=("--no-python", "/bin/false"))
    with pytest.raises(GroupFailed):
        measure(PLAN, [worse], report(), console)


def test_group_whose_rank_is_killed_says_so_and_is_gone() -> None:
    with Group(SHM, 2) as group:
        group.accept_ranks()
        group.call(
            "prepare", op="barrier", dtype="float32", redop="", count=0, root=-1, arena=False
        )
        with socket.socket(fileno=os.dup(group._connections[1].fileno())) as line:
            peer = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        os.kill(struct.unpack("3i", peer)[0], signal.SIGKILL)
        with pytest.raises(GroupFailed):
            group.call("sample", repeats=1_000_000)
        assert not group.alive
        assert group._process.returncode is not None
