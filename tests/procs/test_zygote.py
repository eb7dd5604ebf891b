"""The zygote itself: what it forks, what it refuses, and that it never outlives the launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dure import env
from dure.launch import JobSpec, Line, run_job
from dure.launch.ranks import forking
from dure.launch.ranks.environment import malloc_variables
from dure.launch.ranks.processes import adopting_orphans
from dure.launch.ranks.spawn import RankProcess, start_rank
from dure.launch.ranks.zygote import Zygote, zygote_for
from procs.launching import Launching
from procs.launching import launching as _launching

TAG = "DURE_ZYGOTE_TEST"

MORTAL = """
import importlib.util, os, pathlib, signal

spec = importlib.util.spec_from_file_location("forking", FORKING)
forking = importlib.util.module_from_spec(spec)
spec.loader.exec_module(forking)
fork = forking._fork

def fork_and_die(*arguments):
    answer = fork(*arguments)
    if answer is not None:
        pathlib.Path(__file__).with_name("born").write_text(str(answer["pid"]))
        os.kill(os.getpid(), signal.SIGKILL)
    return answer

forking._fork = fork_and_die
forking.main()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launching]:
    yield from _launching(tmp_path)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    program = tmp_path / "program.py"
    program.write_text("import os, sys; print(os.environ.get('RANK'), 'decimal' in sys.modules)")
    return JobSpec(program=str(program), nproc=2, zygote="always", preload=("decimal",))


@pytest.fixture
def zygote(spec: JobSpec) -> Iterator[Zygote]:
    with contextlib.ExitStack() as stack:
        zygote = ready(spec, stack)
        yield zygote
    assert not os.path.exists(f"/proc/{zygote.pid}")


def ready(spec: JobSpec, stack: contextlib.ExitStack) -> Zygote:
    never, hold = os.pipe()
    stack.callback(os.close, never)
    stack.callback(os.close, hold)
    stack.enter_context(adopting_orphans())
    zygote = stack.enter_context(zygote_for(spec, "a-job", None))
    assert zygote is not None
    assert zygote.trouble(never) is None
    return zygote


def start(spec: JobSpec, zygote: Zygote, **variables: str) -> RankProcess:
    key = os.memfd_create("key")
    try:
        environment = env.child_environment(
            {"DURE_LAUNCHER": "a-job", "PYTHONUNBUFFERED": "1", "RANK": "0"}
            | malloc_variables(spec)
            | variables
        )
        return start_rank(spec, 0, environment, (key,), zygote)
    finally:
        os.close(key)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def output(rank: RankProcess) -> str:
    text = rank.stdout.readall() or b""
    os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
    rank.release()
    return text.decode()


def test_ranks_of_later_rounds_are_forked_from_the_same_zygote(
    spec: JobSpec, zygote: Zygote
) -> None:
    for round in range(3):
        rank = start(spec, zygote, RANK=str(round))
        assert rank.fresh is None
        assert output(rank) == f"{round} True\n"


def test_others_see_the_variables_of_a_forked_rank(spec: JobSpec, zygote: Zygote) -> None:
    Path(spec.program).write_text("print(open('/proc/self/environ').read().strip('\\0'), end='')")
    variables = {"RANK": "12345", "LONG": "y" * 2000, "PATH": ""}
    shown = dict(x.split("=", 1) for x in output(start(spec, zygote, **variables)).split("\0"))
    assert {name: shown.get(name) for name in variables} == variables
    assert "DURE_ROOM" not in shown
    assert shown["DURE_LAUNCHER"] == "a-job"


def test_program_that_changed_between_rounds_is_read_again(spec: JobSpec, zygote: Zygote) -> None:
    assert output(start(spec, zygote)) == "0 True\n"
    beside = Path(spec.program).with_name("written_later.py")
    beside.write_text("NAME = 'later'")
    Path(spec.program).write_text("import written_later; print(written_later.NAME)")
    assert output(start(spec, zygote)) == "later\n"


def test_rank_with_other_start_variables_gets_an_interpreter_of_its_own(
    spec: JobSpec, zygote: Zygote
) -> None:
    rank = start(spec, zygote, OMP_NUM_THREADS="17")
    assert rank.fresh is not None
    assert output(rank) == "0 False\n"


@pytest.mark.parametrize("stopped", [False, True], ids=["dead", "silent"])
def test_ranks_start_afresh_when_the_zygote_is_lost(
    spec: JobSpec, zygote: Zygote, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    zygote.say = said.append
    monkeypatch.setattr("dure.launch.ranks.zygote._FORK_S", 0.2)
    os.kill(zygote.pid, signal.SIGSTOP if stopped else signal.SIGKILL)
    assert output(start(spec, zygote)) == "0 False\n"
    assert output(start(spec, zygote)) == "0 False\n"
    assert len(said) == 1


def test_rank_is_not_started_twice_if_the_zygote_dies_before_it_has_told(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal = tmp_path / "mortal.py"
    mortal.write_text(MORTAL.replace("FORKING", repr(forking.__file__)))
    monkeypatch.setattr("dure.launch.ranks.zygote._FORKING", str(mortal))
    never, hold = os.pipe()
    with adopting_orphans(), zygote_for(spec, "a-job", None) as zygote:
        assert zygote is not None
        assert zygote.trouble(never) is None
        assert output(start(spec, zygote)) == "0 False\n"
        born = int((tmp_path / "born").read_text())
        os.waitpid(born, 0)  # it was given to this process, and has ended
    os.close(never)
    os.close(hold)


def test_zygote_leaves_when_the_user_has_had_enough(spec: JobSpec) -> None:
    interrupted, write = os.pipe()
    os.write(write, b"\2")
    with zygote_for(spec, "a-job", None) as zygote:
        assert zygote is not None
        assert zygote.trouble(interrupted) is not None
        assert not os.path.exists(f"/proc/{zygote.pid}")
    os.close(interrupted)
    os.close(write)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, False),  # the program does not import torch
        ({"preload": ("decimal",)}, True),
        ({"preload": ("decimal",), "nproc": 1}, False),
        ({"preload": ("decimal",), "nproc": 1, "max_restarts": 1}, True),
        ({"preload": ("decimal",), "zygote": "never"}, False),
        ({"preload": ("decimal",), "zygote": "always", "nproc": 1}, True),
        ({"preload": ("decimal",), "kind": "executable", "zygote": "always"}, False),
    ],
)
def test_zygote_is_started_where_the_job_gains(
    spec: JobSpec, fields: dict[str, object], wanted: bool
) -> None:
    fields = {"program": spec.program, "nproc": 2} | fields
    with zygote_for(JobSpec(**fields), "a-job", None) as zygote:  # pyright: ignore
        assert (zygote is not None) == wanted


def test_forked_rank_tells_where_it_is_when_another_fails(spec: JobSpec) -> None:
    here = Path(spec.program).with_name("here")
    text = f"""
        import os, sys, time
        while os.environ["RANK"] == "1":
            if os.path.exists({str(here)!r}): sys.exit(3)
        while True: open({str(here)!r}, "w").close()
    """
    Path(spec.program).write_text(textwrap.dedent(text))
    result = run_job(dataclasses.replace(spec, quiet=True, stdin="none"))
    assert result.exit_code == 3
    assert [(f.file, f.line) for f in result.ranks[0].stack] == [(spec.program, 5)]


@pytest.mark.parametrize("when", ["importing", "running"])
def test_killed_launcher_leaves_no_zygote(job: Launching, when: str) -> None:
    job.write("print('importing', flush=True)\nimport time\ntime.sleep(60)", "torch.py")
    if when == "running":
        job.write("", "torch.py")
    program = job.write("""
        import os, time, torch
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                print("running", flush=True)
                time.sleep(60)
            os._exit(0)
        time.sleep(60)
    """)
    started = job.start("--nproc", "2", program)
    if when == "running":
        assert started.stdout is not None
        started.stdout.readline()
    else:
        until(lambda: len(job.left()) > 1)
    started.kill()
    started.communicate()
    until(lambda: job.left() == [] and not list(job.directory.glob("dure_*")))


def test_torch_works_in_forked_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TORCH)
    lines: list[Line] = []
    run_job(
        JobSpec(
            program=str(program),
            nproc=2,
            on_line=lines.append,
            quiet=True,
            env={"OMP_NUM_THREADS": "2"},
        )
    ).check()
    for rank in range(2):
        told = [line.text.decode() for line in lines if line.rank == rank]
        assert told == [
            "forked True",
            "threads 2 2",
            "loader [0, 1, 2, 3]",
            "alike False",
            "sum True",
        ]


TORCH = """
import ctypes, os, sys
import numpy, torch
import torch.utils.data
import dure
print("forked", open("/proc/self/cmdline").read().split("\\0")[1].endswith("forking.py"))
a = torch.rand(400, 400)
(a @ a).sum(), torch.linalg.svd(a), numpy.linalg.svd(a.numpy())
print("threads", torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
loader = torch.utils.data.DataLoader(range(4), num_workers=2, batch_size=None)
print("loader", list(loader))
with dure.process_group():
    both = [None, None]
    dure.all_gather_object(both, (torch.initial_seed(), numpy.random.random()))
    print("alike", any(a == b for a, b in zip(*both)))
    t = torch.ones(1000)
    dure.all_reduce(t)
    print("sum", bool((t == 2).all()))
"""
