"""Whoever reads a command's output may leave early: the command then ends without a word."""

import os
import signal
import subprocess
import sys

import pytest

WORDS = [["version"], ["--help"], ["run", "--help"]]
DRY = ["run", "--dry-run", "--hosts", "one,two", "--nproc", "2", "train.py"]


def ended(words: list[str], *, errors_too: bool) -> tuple[int, bytes]:
    """Run a command whose output nobody reads; return its exit code and what it says of it."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dure.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write if errors_too else subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write)
    return done.returncode, done.stderr or b""


@pytest.mark.parametrize("words", [*WORDS, DRY], ids=" ".join)
def test_output_that_nobody_reads_ends_a_command_as_sigpipe_would(words: list[str]) -> None:
    assert ended(words, errors_too=False) == (128 + signal.SIGPIPE, b"")


def test_a_complaint_that_nobody_reads_does_so_too() -> None:
    assert ended(["run"], errors_too=True) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_output_that_a_full_disk_does_not_take_is_one_line(words: list[str]) -> None:
    command = [sys.executable, "-m", "dure.cli", *words]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)


def test_a_closed_standard_output_is_no_error() -> None:
    words = f"exec {sys.executable} -m dure.cli version >&-"
    done = subprocess.run(["/bin/sh", "-c", words], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
