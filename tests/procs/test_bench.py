"""`dure bench` for real: every operation right, rivals beside it, clear refusals, nothing left."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure.cli.bench.group import Contestant, Group, GroupFailed
from dure.cli.bench.measure import Progress, measure
from dure.cli.bench.plan import OPERATIONS
from dure.cli.bench.results import Report, read_report
from procs.launching import DURE, living

QUICK = ("--samples", "2", "--sample-time", "0.001")


class Bench:
    """Runs the command with a tag in its environment, by which its processes are found."""

    def __init__(self) -> None:
        self.tag = f"BENCH_TEST={uuid.uuid4().hex}"
        name, _, value = self.tag.partition("=")
        self.environment = os.environ | {name: value}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*DURE, "bench", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err


@pytest.fixture
def bench() -> Iterator[Bench]:
    running = Bench()
    yield running
    left = living(running.tag)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


MPI = bool(shutil.which("mpirun") and importlib.util.find_spec("mpi4py"))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Return what a run of all operations beside all rivals printed, its figures and its plot."""
    folder = tmp_path_factory.mktemp("bench")
    json, plot = folder / "figures.json", folder / "plot.html"
    rivals = "gloo,mpi" if MPI else "gloo"
    words = ("--op", "all", "--sizes", "4,12K", "--ranks", "2", "--against", rivals, *QUICK)
    code, out, err = Bench().run(*words, "--json", str(json), "--plot", str(plot))
    assert code == 0, err
    return out, json, plot


def test_every_operation_is_measured_and_right_beside_gloo(bench, everything):
    out, json, plot = everything
    report = read_report(json.read_bytes(), "figures")
    assert report.contestants[:2] == ["dure shm", "gloo"]
    assert {cell.op for cell in report.cells} == set(OPERATIONS)
    for cell in report.cells:
        assert (len(cell.samples_s), cell.wrong) == (2, 0), cell
        assert min(cell.samples_s) > 0
    assert "reduce_scatter (sum), float32, 2 ranks: dure shm" in out
    assert plot.stat().st_size > 10_000
    code, shown, err = bench.run("--from", str(json))
    assert (code, shown.strip()) == (0, out.strip()), err


@pytest.mark.skipif(not MPI, reason="mpi4py or mpirun is missing")
def test_mpi_is_measured_and_right(everything):
    report = read_report(everything[1].read_bytes(), "figures")
    assert len(report.contestants) == 3
    measured = [cell for cell in report.cells if cell.contestant == report.contestants[2]]
    assert {cell.op for cell in measured} == set(OPERATIONS)


def test_arena_bfloat16_and_three_ranks_are_right(bench):
    words = ("--op", "all_reduce,reduce_scatter,all_to_all", "--dtype", "bfloat16,int8")
    code, out, err = bench.run(
        *words, "--sizes", "1000", "--ranks", "3", "--arena", "--redop", "max", "--markdown", *QUICK
    )
    assert code == 0, err
    assert out.count("| 0 |") == 6


@pytest.mark.parametrize(
    "words",
    [
        ("--op", "all_reduced"),
        ("--dtype", "float31"),
        ("--sizes", "8:4"),
        ("--backend", "smoke"),
        ("--against", "nccl"),
        ("--against", "mpi@/no/such/python"),
        ("--ranks", "4000", "--sizes", "1G"),
        ("--json", "/no/such/folder/x.json"),
        ("--plot", "plot.png"),
        ("--from", "/no/such/file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(words, capfd):
    from dure.cli.app import run_command_line

    assert run_command_line(["bench", *words]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith("dure bench: error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_leaves_no_process(bench, number):
    process = bench.start("--sizes", "8", "--ranks", "2", "--samples", "100000")
    deadline = time.monotonic() + 60
    while len(_ranks(bench)) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
    process.send_signal(number)
    process.communicate(timeout=100)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    while living(bench.tag):
        assert time.monotonic() < deadline


def _ranks(bench: Bench) -> list[int]:
    """Return the ranks that have come as far as their program."""
    return [pid for pid in living("\0RANK=") if pid in living(bench.tag)]


def _report(plan) -> Report:
    return Report(command="", when="", machine={}, versions={}, plan=plan)


def test_wrong_results_are_counted_and_make_the_command_fail(bench, tmp_path):
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
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
    bench.environment["PYTHONPATH"] = path
    code, out, err = bench.run("--sizes", "64", "--ranks", "2", *QUICK)
    assert code == 1, (out, err)
    assert "4 wrong elements" in err


def test_rival_that_cannot_start_is_left_out_and_ours_is_fatal():
    from unit.bench.test_plan import PLAN

    good = Contestant(name="dure", role=("dure", "shm"))
    bad = Contestant(name="dure", role=("dure", "smoke"))
    notes: list[str] = []
    progress = Progress()
    progress.note = notes.append  # type: ignore[method-assign]
    report = _report(PLAN)
    measure(PLAN, [good, bad], report, progress)
    assert report.contestants == ["dure shm"]
    assert len(report.cells) == 2
    assert len(notes) == 1
    worse = Contestant(name="dure", role=(), program=("--no-python", "/bin/false"))
    with pytest.raises(GroupFailed):
        measure(PLAN, [worse], _report(PLAN), progress)


def test_group_whose_rank_is_killed_says_so_and_is_gone():
    with Group(Contestant(name="dure", role=("dure", "shm")), 2) as group:
        group.meet()
        group.call(
            "prepare", op="barrier", dtype="float32", redop="", count=0, root=-1, arena=False
        )
        assert group._process is not None
        children = Path(f"/proc/{group._process.pid}/task/{group._process.pid}/children")
        ranks = [int(pid) for pid in children.read_text().split() if int(pid) in living("\0RANK=")]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(GroupFailed):
            group.call("sample", repeats=1_000_000)
        assert not group.alive
        assert group._process.returncode is not None
