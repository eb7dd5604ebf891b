"""A forked rank sees what a rank in a fresh interpreter sees, however awkward its program."""

from __future__ import annotations

import dataclasses
import os
import pty
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure import env
from dure.launch import Crash, Exit, JobResult, JobSpec, Line, run_job
from dure.launch.ranks.environment import malloc_variables
from dure.launch.ranks.processes import adopting_orphans
from dure.launch.ranks.report import ReportReader
from dure.launch.ranks.spawn import start_rank
from dure.launch.ranks.zygote import Zygote, zygote_for
from procs.zygote_programs import FACTS, PROGRAMS

CHEAP = ("textwrap", "decimal")
"""What the zygote imports in place of torch."""


class Runs:
    """Runs programs in both ways, and keeps what they print."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, text: str, name: str = "program.py") -> str:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    def run(self, program: str, **fields: object) -> tuple[JobResult, list[tuple[int, str, bytes]]]:
        lines: list[Line] = []
        spec = JobSpec(program=program, on_line=lines.append, quiet=True, **fields)  # pyright: ignore
        result = run_job(spec)
        assert ended(result) == []
        return result, sorted((line.rank, line.stream, line.text) for line in lines)

    def both(self, program: str, **fields: object) -> JobResult:
        """Run in both ways, compare, and return the forked one's result."""
        fresh, printed = self.run(program, zygote="never", **fields)
        forked, printed_too = self.run(program, zygote="always", preload=CHEAP, **fields)
        assert printed_too == printed
        assert [rank.exit for rank in forked.ranks] == [rank.exit for rank in fresh.ranks]
        assert [rank.crash for rank in forked.ranks] == [rank.crash for rank in fresh.ranks]
        assert forked.exit_code == fresh.exit_code
        assert len(forked.outlived) == len(fresh.outlived)
        return forked


def ended(result: JobResult) -> list[int]:
    """Return which ranks are still there."""
    return [rank.pid for rank in result.ranks if os.path.exists(f"/proc/{rank.pid}")]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    runs = Runs(tmp_path)
    runs.write("NAME = 'beside'", "beside.py")
    runs.write("NAME = 'shadow'", "colorsys.py")
    return runs


@pytest.fixture
def stdin() -> Iterator[None]:
    """Let a test put something else at descriptor 0, and put the old one back."""
    kept = os.dup(0)
    yield
    os.dup2(kept, 0)
    os.close(kept)


@dataclasses.dataclass
class Seen:
    """What becomes of a rank, seen from outside."""

    out: bytes
    err: bytes
    exit: Exit | None
    crash: Crash | None


class Stage:
    """One zygote, before which one program after the other is put on, under one name."""

    def __init__(self, spec: JobSpec, zygote: Zygote) -> None:
        self.spec = spec
        self._zygote = zygote
        self._key = os.memfd_create("key")

    def perform(self, text: str, *, forked: bool) -> Seen:
        Path(self.spec.program).write_text(textwrap.dedent(text))
        variables = env.child_environment(
            {
                "DURE_LAUNCHER": "a-job",
                "PYTHONUNBUFFERED": "1",
                "RANK": "0",
                "WORLD_SIZE": "1",
                "DURE_JOB_KEY_FD": str(self._key),
            }
            | malloc_variables(self.spec)
        )
        zygote = self._zygote if forked else None
        rank = start_rank(self.spec, 0, variables, (self._key,), zygote)
        assert (rank.fresh is None) == forked
        out, err = rank.stdout.readall() or b"", rank.stderr.readall() or b""
        os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
        report = ReportReader()
        report.feed(os.read(rank.report_fd, 1 << 16))
        seen = Seen(out, err, rank.exit(), report.crash)
        rank.release()
        return seen

    def close(self) -> None:
        os.close(self._key)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    before, directory = os.getcwd(), tmp_path_factory.mktemp("stage")
    (directory / "beside.py").write_text("NAME = 'beside'")
    (directory / "colorsys.py").write_text("NAME = 'shadow'")
    os.chdir(directory)
    never, hold = os.pipe()
    spec = JobSpec(
        program=str(directory / "program.py"),
        args=("--one", "two words", ""),
        zygote="always",
        preload=CHEAP,
    )
    with adopting_orphans(), zygote_for(spec, "a-job", None) as zygote:
        assert zygote is not None
        assert zygote.trouble(never) is None
        stage = Stage(spec, zygote)
        yield stage
        stage.close()
    os.close(never)
    os.close(hold)
    os.chdir(before)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_sees_the_same_as_in_a_fresh_interpreter(stage: Stage, name: str) -> None:
    fresh, forked = (stage.perform(PROGRAMS[name], forked=way) for way in (False, True))
    assert forked == fresh


def test_daemon_of_a_forked_rank_that_fails_is_found_and_ended(runs: Runs) -> None:
    result = runs.both(
        runs.write("""
            import os, time
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    print("daemon", flush=True)
                    time.sleep(60)
                os._exit(0)
            os.wait()
            raise SystemExit(3)
        """)
    )
    assert len(result.outlived) == 1


def test_zygote_is_what_ranks_were_forked_from(runs: Runs) -> None:
    _, lines = runs.run(
        runs.write("import sys; print('decimal' in sys.modules, sys.stdin.read())"),
        zygote="always",
        preload=CHEAP,
        nproc=3,
        stdin="none",
    )
    assert lines == [(rank, "stdout", b"True ") for rank in range(3)]


@pytest.mark.parametrize("kind", ["module", "directory"])
def test_modules_and_directories_see_the_same(runs: Runs, kind: str) -> None:
    runs.write("", "package/__init__.py")
    runs.write(FACTS, "package/tool.py")
    runs.write(FACTS, "application/__main__.py")
    if kind == "module":
        runs.both("package.tool", kind="module", args=("-x",))
    else:
        runs.both("application", args=("-x",))


VARIABLES = {
    "PYTHONHASHSEED": "7",
    "PYTHONWARNINGS": "error::UserWarning",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONOPTIMIZE": "1",
    "PYTHONIOENCODING": "latin-1:replace",
    "PYTHONSAFEPATH": "1",
    "PYTHONSTARTUP": "/nowhere.py",
    "PYTHONPATH": "one:two",
    "SEVERAL": "lines\nand \udcff bytes",
    "LARGE": "x" * 100_000,
}


def test_environment_is_the_same(runs: Runs) -> None:
    variables = dict(VARIABLES) | {"PYTHONPATH": os.environ.get("PYTHONPATH", "") + ":one"}
    runs.both(runs.write(FACTS), env=variables | {"HOME": None}, args=("y" * 100_000,))


def test_options_of_the_interpreter_are_handed_on(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("-OB", "-Xdev", "-W", "error::UserWarning", "-W", "ignore::ResourceWarning")
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *options, "-P", "-m", "pytest"])
    program = runs.write("""
        import json, sys
        print(json.dumps([list(sys.flags), sys.warnoptions, sys.orig_argv[-2:], __debug__]))
    """)
    runs.both(program, args=("x",))
    _, lines = runs.run(program, zygote="never", args=("x",))
    words = [sys.executable, *options, program, "x"]
    alone = subprocess.run(words, capture_output=True, check=True).stdout.strip()
    assert lines == [(0, "stdout", alone)]


def test_rank_zero_reads_standard_input(runs: Runs, stdin: None) -> None:
    program = runs.write("""
        import sys
        try:
            print(repr(input()), sys.stdin.readline(), sys.stdin.buffer.read())
        except EOFError:
            print("end")
    """)
    answers = []
    for way in ("never", "always"):
        read, write = os.pipe()
        os.write(write, b"first\nsecond\nthe rest")
        os.close(write)
        os.dup2(read, 0)
        os.close(read)
        answers.append(runs.run(program, nproc=2, zygote=way, preload=CHEAP)[1])
    assert answers[0] == answers[1]
    assert (0, "stdout", b"'first' second") in answers[1]
    assert (1, "stdout", b"end") in answers[1]


def test_standard_input_may_be_a_terminal(runs: Runs, stdin: None) -> None:
    ours, theirs = pty.openpty()
    os.dup2(theirs, 0)
    try:
        runs.both(runs.write(FACTS))
    finally:
        os.close(ours)
        os.close(theirs)


def test_every_rank_draws_for_itself(runs: Runs) -> None:
    pytest.importorskip("numpy")
    program = runs.write("""
        import multiprocessing, os, random, tempfile, uuid
        import numpy.random
        print(random.random())
        print(numpy.random.random())
        print(bytes(multiprocessing.current_process().authkey).hex())
        print(uuid.uuid4(), next(tempfile._get_candidate_names()))
    """)
    preload = ("numpy.random", "multiprocessing.process", "uuid", "tempfile")
    _, lines = runs.run(program, nproc=2, zygote="always", preload=preload)
    assert len({text for _, _, text in lines}) == len(lines) == 8


UNFIT = {
    "starts a thread": "import threading\nthreading.Thread(target=input, daemon=True).start()\n"
    "import time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "starts a process": "import subprocess\nchild = subprocess.Popen(['sleep', '1'])",
    "is traced": "import sys\nsys.settrace(lambda *_: None)",
    "fails": "raise ValueError('no')",
    "exits": "import sys\nsys.exit(3)",
    "ends the process": "import os\nos._exit(3)",
    "puts itself first": "import sys\nsys.path.insert(0, 'first')",
    "imports what lies beside": "import beside",
}


@pytest.mark.parametrize("what", UNFIT)
def test_unfit_import_is_told(runs: Runs, what: str) -> None:
    runs.write(UNFIT[what], "unfit.py")
    spec = JobSpec(program=runs.write(""), zygote="always", preload=("unfit",))
    never, hold = os.pipe()
    with zygote_for(spec, "a-job", None) as zygote:
        assert zygote is not None
        assert zygote.trouble(never) is not None
    os.close(never)
    os.close(hold)


def test_unfit_import_leaves_ranks_to_fresh_interpreters(runs: Runs) -> None:
    runs.write(UNFIT["is traced"], "unfit.py")
    program = runs.write("import sys; print('unfit' in sys.modules, sys.gettrace())")
    _, lines = runs.run(program, zygote="always", preload=("unfit",), nproc=2)
    assert lines == [(rank, "stdout", b"False None") for rank in range(2)]


def test_what_an_import_prints_is_printed_by_every_rank(runs: Runs) -> None:
    runs.write("import sys\nprint('loaded')\nprint('beware', file=sys.stderr)", "talks.py")
    program = runs.write("import talks; print('program')")
    _, fresh = runs.run(program, nproc=2, zygote="never")
    _, forked = runs.run(program, nproc=2, zygote="always", preload=("talks",))
    assert fresh == forked
