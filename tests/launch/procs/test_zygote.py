"""The zygote itself: what it forks, what it refuses, and that it never outlives the launcher."""

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure.launch import JobSpec, Line, run_job
from dure.launch.ranks.zygote import zygote_for
from tests.launch.procs.launching import Launching, described
from tests.launch.procs.zygote_programs import Stage, ended, put, staged
from tests.waiting import until


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    text = "import os, sys; print(os.environ.get('RANK'), 'decimal' in sys.modules)"
    program = put(tmp_path / "program.py", text)
    return JobSpec(program=program, nproc=2, preload=("decimal",))


@pytest.fixture
def stage(spec: JobSpec) -> Iterator[Stage]:
    with staged(spec) as stage:
        yield stage


def test_ranks_of_later_rounds_are_forked_from_the_same_zygote(stage: Stage) -> None:
    for round in range(3):
        assert stage.rank(RANK=str(round)).out == b"%d True\n" % round
    put(Path(stage.spec.program).with_name("written_later.py"), "NAME = 'later'")
    put(Path(stage.spec.program), "import written_later; print(written_later.NAME)")
    assert stage.rank().out == b"later\n"


def test_variables_that_the_program_sets_too_late_are_named(stage: Stage) -> None:
    put(
        Path(stage.spec.program),
        "import os\nfrom dure import env\nprint([env.set_too_late_note()])\n"
        "os.environ.update(OMP_NUM_THREADS='3', TORCH_HOME='read late', OTHER='1',"
        " KMP_INIT_AT_FORK='FALSE')\n"
        "del os.environ['MKL_NUM_THREADS']\nprint(env.set_too_late_note())",
    )
    told = stage.rank(MKL_NUM_THREADS="1", OMP_NUM_THREADS="2").out.decode().splitlines()
    assert told[0] == "['']"
    assert told[1].startswith("MKL_NUM_THREADS, OMP_NUM_THREADS changed in the program after torch")
    afresh = stage.rank(forked=False, MKL_NUM_THREADS="1").out.decode().splitlines()
    assert afresh == ["['']", ""]


def test_ranks_start_afresh_when_the_zygote_is_lost(spec: JobSpec) -> None:
    said: list[str] = []
    with staged(spec, said.append) as stage:
        os.kill(stage.zygote.pid, signal.SIGKILL)
        for _ in range(2):
            rank = stage.start()
            assert rank.fresh is not None
            assert ended(rank).out == b"0 False\n"
    assert len(said) == 1


def test_rank_is_known_though_the_zygote_dies_while_it_forks(spec: JobSpec) -> None:
    """It would be started twice otherwise."""
    text = """
        import os, signal
        forks = []  # the first is for trial, the second makes the intermediate
        def die():
            if len(forks) == 2:
                os.kill(os.getppid(), signal.SIGKILL)
        os.register_at_fork(before=lambda: forks.append(1), after_in_child=die)
    """
    put(Path(spec.program).with_name("mortal.py"), text)
    with staged(dataclasses.replace(spec, preload=("decimal", "mortal"))) as stage:
        assert stage.rank().out == b"0 True\n"


def test_request_to_end_that_reaches_all_processes_is_left_to_the_launcher(stage: Stage) -> None:
    text = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []), end='')"
    put(Path(stage.spec.program), text)
    os.kill(stage.zygote.pid, signal.SIGTERM)
    assert stage.rank().out == b"set()"


def test_zygote_leaves_when_the_user_has_had_enough(spec: JobSpec) -> None:
    interrupted, write = os.pipe()
    os.write(write, b"\2")
    with open(interrupted), open(write), zygote_for(spec, "a-job", None) as zygote:
        said: list[str] = []
        assert not zygote.is_ready(interrupted, said.append)
        assert said == []
        assert not os.path.exists(f"/proc/{zygote.pid}")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, False),  # the program does not import torch
        ({"preload": ("decimal",)}, True),
        ({"preload": ("decimal",), "nproc": 1}, False),
        ({"preload": ("decimal",), "nproc": 1, "max_restarts": 1}, True),
        ({"preload": ("decimal",), "zygote": "never"}, False),
        ({"preload": ("decimal",), "kind": "executable"}, False),
    ],
)
def test_zygote_is_started_where_the_job_gains(
    spec: JobSpec, fields: dict[str, object], wanted: bool
) -> None:
    fields = {"program": spec.program, "nproc": 2} | fields
    with zygote_for(JobSpec(**fields), "a-job", None) as zygote:  # pyright: ignore
        assert (zygote is not None) == wanted


def test_launcher_that_is_killed_while_the_zygote_imports_leaves_none(job: Launching) -> None:
    job.write("import time\ntime.sleep(600)", "slow.py")
    started = job.start("--nproc", "2", "--preload", "slow", job.write(""))
    until(lambda: len(job.left()) > 1, lambda: f"a zygote beside {described(job.left())}")
    started.kill()
    job.wait_until_gone()


TORCH = """
import os, sys, time, weakref
import numpy, torch
import torch.utils.data
import dure
print("forked", "forking.py" in open("/proc/self/cmdline").read())
a = torch.rand(400, 400)
(a @ a).sum(), torch.linalg.svd(a), numpy.linalg.svd(a.numpy())
print("threads", torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
loader = torch.utils.data.DataLoader(range(4), num_workers=2, batch_size=None)
print("loader", list(loader))
vars(os)["environ"]["PYTORCH_JIT"] = "0"  # written so that nobody reads it before the start
dure.init_process_group()
both = [None, None]
dure.all_gather_object(both, (torch.initial_seed(), numpy.random.random()))
print("alike", any(a == b for a, b in zip(*both)))
t = torch.ones(1000)
dure.all_reduce(t)
print("sum", bool((t == 2).all()))
# Without these, threads of gloo that wait for the interpreter at its end would abort the rank.
print("exit handlers", all(f.atexit for f in weakref.finalize._registry))
while dure.get_rank() == 1:
    if os.path.exists(sys.argv[1]):
        sys.exit(3)
    time.sleep(0.01)
os.close(os.open(sys.argv[1], os.O_CREAT)), time.sleep(600)
"""


def test_torch_works_in_forked_ranks_and_they_tell_where_they_are(tmp_path: Path) -> None:
    program, lines = put(tmp_path / "program.py", TORCH), list[Line]()
    result = run_job(
        JobSpec(
            program=program,
            args=(str(tmp_path / "up"),),
            nproc=2,
            on_line=lines.append,
            quiet=True,
            env={"OMP_NUM_THREADS": "2"},
        )
    )
    wanted = ["forked True", "threads 2 2", "loader [0, 1, 2, 3]", "alike False", "sum True"]
    wanted.append("exit handlers True")
    for rank in range(2):
        said = [line.text.decode() for line in lines if line.rank == rank]
        assert [line for line in said if not line.startswith("PYTORCH_JIT")] == wanted
        assert len(said) == len(wanted) + (rank == 0)
    assert result.exit_code == 3
    assert [(f.file, f.line) for f in result.ranks[0].stack] == [(program, TORCH.count("\n"))]
