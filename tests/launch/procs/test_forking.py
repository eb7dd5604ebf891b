"""A forked rank sees what a rank in a fresh interpreter sees, and both what plain Python shows."""

import contextlib
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dure.launch import JobSpec
from dure.launch.ranks.zygote import zygote_for
from tests.launch.procs.zygote_programs import CHEAP, FACTS, PROGRAMS, Stage, put, staged

ONLY_RANKS = ("facts", "interrupted")
"""Programs that show that they are ranks; and Ctrl-C, of which a rank says nothing."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("stage")
    put(directory / "beside.py", "NAME = 'beside'")
    put(directory / "colorsys.py", "NAME = 'shadow'")
    program, args = put(directory / "program.py", ""), ("--one", "two words", "")
    spec = JobSpec(program=program, args=args, nproc=2, preload=CHEAP)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        with staged(spec) as stage:
            yield stage


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_sees_the_same_however_it_is_started(stage: Stage, name: str) -> None:
    put(Path(stage.spec.program), PROGRAMS[name])
    seen = stage.both()
    if name not in ONLY_RANKS:
        alone = stage.alone()
        assert (seen.out, seen.err, seen.exit) == (alone.out, alone.err, alone.exit)


@pytest.mark.parametrize(
    ("kind", "program"), [("module", "package.tool"), ("script", "application")]
)
def test_modules_and_directories_see_the_same(here: Path, kind: str, program: str) -> None:
    put(here / "package/__init__.py", "")
    put(here / "package/tool.py", FACTS)
    put(here / "application/__main__.py", FACTS)
    with staged(
        JobSpec(program=program, kind=kind, args=("-x",), nproc=2, preload=CHEAP)  # pyright: ignore
    ) as stage:
        assert stage.both().crash is None


VARIABLES = {
    "PYTHONHASHSEED": "7",
    "PYTHONWARNINGS": "error::UserWarning",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONOPTIMIZE": "1",
    "PYTHONIOENCODING": "latin-1:replace",
    "PYTHONSAFEPATH": "1",
    "PYTHONSTARTUP": "/nowhere.py",
    "SEVERAL": "lines\nand \udcff bytes",
    "LARGE": "x" * 100_000,
}


def test_environment_is_the_same(here: Path) -> None:
    variables = VARIABLES | {"PYTHONPATH": os.environ.get("PYTHONPATH", "") + ":one", "HOME": None}
    program, args = put(here / "program.py", FACTS), ("y" * 100_000,)
    spec = JobSpec(program=program, args=args, env=variables, nproc=2, preload=CHEAP)
    with staged(spec) as stage:
        assert stage.both().crash is None


def test_options_of_the_interpreter_are_handed_on(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("-OB", "-Xdev", "-W", "error::UserWarning", "-W", "ignore::ResourceWarning")
    for module in ("spawn", "zygote"):
        monkeypatch.setattr(f"dure.launch.ranks.{module}.interpreter_options", lambda: options)
    program = put(
        here / "program.py",
        "import sys; print([*sys.flags], sys.warnoptions, sys.orig_argv[-2:], __debug__)",
    )
    with staged(JobSpec(program=program, args=("x",), nproc=2, preload=CHEAP)) as stage:
        seen = stage.both()
    words = [sys.executable, *options, program, "x"]
    assert seen.out == subprocess.run(words, capture_output=True, check=True).stdout


@contextlib.contextmanager
def standard_input(fd: int) -> Iterator[None]:
    kept = os.dup(0)
    os.dup2(fd, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_standard_input_may_be_a_terminal(stage: Stage) -> None:
    put(Path(stage.spec.program), FACTS)
    ours, theirs = pty.openpty()
    with standard_input(theirs):
        assert stage.both().crash is None
    os.close(ours)
    os.close(theirs)


def test_every_rank_draws_for_itself(here: Path) -> None:
    pytest.importorskip("numpy")
    program = """
        import multiprocessing, random, tempfile, uuid, numpy.random
        print(random.random(), numpy.random.random(), uuid.uuid4(), sep="\\n")
        print(bytes(multiprocessing.current_process().authkey).hex())
        print(next(tempfile._get_candidate_names()))
    """
    preload = ("numpy.random", "multiprocessing.process", "uuid", "tempfile")
    spec = JobSpec(program=put(here / "p.py", program), nproc=2, preload=preload)
    with staged(spec) as stage:
        lines = [line for _ in range(2) for line in stage.rank().out.splitlines()]
    assert len(set(lines)) == len(lines) == 10


UNFIT = {
    "starts a thread": "import threading\nthreading.Thread(target=input, daemon=True).start()\n"
    "import time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "starts a process": "import subprocess\nchild = subprocess.Popen(['sleep', '1'])",
    "fails": "raise ValueError('no')",
    "ends the process": "import os\nos._exit(3)",
}


@pytest.mark.parametrize("what", UNFIT)
def test_unfit_import_leaves_ranks_to_fresh_interpreters(here: Path, what: str) -> None:
    put(here / "unfit.py", UNFIT[what])
    spec = JobSpec(program=put(here / "p.py", ""), nproc=2, preload=("unfit",))
    never, hold = os.pipe()
    said: list[str] = []
    with open(never), open(hold), zygote_for(spec, "a-job", None) as zygote:
        assert not zygote.is_ready(never, said.append)
        assert len(said) == 1
        assert zygote.fork(None) is None  # pyright: ignore[reportArgumentType]
