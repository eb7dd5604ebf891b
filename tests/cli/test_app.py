"""The command `dure`: the same by every name, and quiet when its output is not read."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

WORDS = [["version"], ["--version"], ["--help"], ["run", "--help"]]
DRY = ["run", "--dry-run", "--hosts", "one,two", "--nproc", "2", "train.py"]
CLOSED = (128 + signal.SIGPIPE, b"")


def ended(words: list[str], stdout: int, stderr: int = subprocess.PIPE) -> tuple[int, bytes]:
    """Run a command; return its exit code and what it says on its standard error."""
    command = [sys.executable, "-m", "dure.cli", *words]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, check=False
    )
    return done.returncode, done.stderr or b""


@pytest.mark.parametrize("words", [*WORDS, DRY], ids=" ".join)
def test_output_that_nobody_reads_ends_a_command_as_sigpipe_would(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        assert ended(words, write) == CLOSED
        assert ended(["run"], write, write) == CLOSED  # which is a complaint
    finally:
        os.close(write)


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_output_that_a_full_disk_does_not_take_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        code, said = ended(words, full.fileno())
    assert (code, said.count(b"\n")) == (1, 1)


def test_a_closed_standard_output_is_no_error() -> None:
    words = f"exec {sys.executable} -m dure.cli version >&-"
    done = subprocess.run(["/bin/sh", "-c", words], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_launcher_whose_streams_are_closed_runs_its_job(closed: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, sys\n"
        "print('output')\n"
        "print('error', file=sys.stderr)\n"
        "pathlib.Path(sys.argv[1], 'ran' + os.environ['RANK']).touch()\n"
    )
    words = (
        f"exec {sys.executable} -m dure.cli run --nproc 2 --no-zygote {program} {tmp_path} {closed}"
    )
    done = subprocess.run(["/bin/sh", "-c", words], stdout=subprocess.DEVNULL, check=False)
    assert (done.returncode, len(list(tmp_path.glob("ran*")))) == (0, 2)


def test_a_launcher_that_may_open_too_few_files_says_so() -> None:
    words = f"ulimit -n 60; exec {sys.executable} -m dure.cli run --no-python true"
    done = subprocess.run(["/bin/sh", "-c", words], capture_output=True, check=False)
    assert (done.returncode, b"Too many open files" in done.stderr) == (1, True)


@pytest.mark.parametrize("module", ["dure", "dure.run", "dure.launch"])
def test_modules_that_torch_users_would_start_are_the_command(module: str) -> None:
    words = [] if module != "dure" else ["run"]
    wrong = [sys.executable, "-m", module, *words, "--nproc", "x", "train.py"]
    shown = subprocess.run(wrong, capture_output=True, check=False)
    assert shown.returncode == 2
    assert shown.stderr.startswith(b"dure run: error: ")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["env", "FOO"],
            "dure env: error: unexpected argument 'FOO': `dure env` takes no arguments. "
            "Leave 'FOO' out; `dure env --help` lists the options.",
        ),
        (
            ["checkpoint", "diff", "/", "/", "c"],
            "dure checkpoint: error: unexpected argument 'c': `dure checkpoint diff` takes 2 "
            "arguments: first, second. Leave 'c' out; `dure checkpoint diff --help` lists the "
            "options.",
        ),
    ],
)
def test_a_surplus_argument_is_named_with_what_the_command_takes(
    words: list[str], text: str
) -> None:
    assert ended(words, subprocess.DEVNULL) == (2, f"{text}\n".encode())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["bench", "--qq"], "dure bench: error: no such option: --qq. See `dure bench --help`."),
        (["bech"], "dure: error: no such command 'bech'. Did you mean 'bench'? See `dure --help`."),
        (["--loud"], "dure: error: no such option: --loud. See `dure --help`."),
        (
            ["trace", "merg"],
            "dure trace: error: no such command 'merg'. Did you mean 'merge'? "
            "See `dure trace --help`.",
        ),
        (
            ["checkpoint", "show"],
            "dure checkpoint: error: missing argument 'folder'. See `dure checkpoint show --help`.",
        ),
        (
            ["checkpoint", "show", "/nowhere"],
            "dure checkpoint: error: invalid value for 'folder': '/nowhere' does not exist. "
            "See `dure checkpoint show --help`.",
        ),
        (["train.py"], "dure: error: no such command 'train.py'. See `dure --help`."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_in_a_command_line_is_one_line_with_advice(words: list[str], text: str) -> None:
    assert ended(words, subprocess.DEVNULL) == (2, f"{text}\n".encode())


@pytest.mark.parametrize("words", [[], ["trace"]], ids=["dure", "dure trace"])
def test_a_command_without_words_prints_its_help(words: list[str]) -> None:
    command = [sys.executable, "-m", "dure.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"Usage: {' '.join(['dure', *words])}" in done.stdout + done.stderr


def test_an_invalid_level_of_the_log_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURE_LOG", "loud")
    code, said = ended(["run", "program.py"], subprocess.DEVNULL)
    assert (code, said.count(b"DURE_LOG must be"), said.count(b"\n")) == (2, 1, 1)
