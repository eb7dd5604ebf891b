"""What a rank's bootstrap tells of the exception that leaves its program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dure as dist
from dure.errors import Desync, PeerLost
from dure.launch.ranks import child
from dure.testing import run_ranks


def raised() -> BaseException:
    namespace: dict[str, object] = {}
    code = "def call(fail):\n    fail()\n"
    exec(compile(code, "/home/me/train.py", "exec"), namespace)
    library: dict[str, object] = {"Desync": Desync}
    code = "def fail():\n    raise Desync('not the same')\n"
    exec(compile(code, f"{child._DURE}comm/x.py", "exec"), library)
    try:
        namespace["call"](library["fail"])  # pyright: ignore[reportCallIssue]
    except Desync as error:
        return error
    raise AssertionError


def test_error_of_dure_ends_with_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised()
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # this file's own frame
    text = child._formatted(error)
    assert text.splitlines()[1] == '  File "/home/me/train.py", line 2, in call'
    assert "comm/x.py" not in text
    monkeypatch.setenv("DURE_TRACEBACK", "full")
    assert "comm/x.py" in child._formatted(error)


def test_traceback_is_printed_before_the_crash_is_reported(tmp_path: Path) -> None:
    """The launcher ends the job once it knows of a crash: what comes later may be lost."""
    program = tmp_path / "program.py"
    program.write_text("raise ValueError('first')")
    reading, writing = os.pipe()
    words = [sys.executable, child.__file__, str(writing), "0", "", "script", str(program)]
    with open(reading) as both:
        with open(writing, "w"):
            subprocess.run(words, stderr=writing, pass_fds=(writing,), check=False)
        text = both.read()
    assert 0 <= text.index("Traceback") < text.index('{"crash"')
    assert text.count("ValueError: first\n") == 1


def test_a_crash_blames_a_rank_of_the_job_not_of_a_group():
    def body(rank):
        group = dist.new_group([1, 2])
        if rank == 0:
            return child._blamed(ValueError("no peer"))
        error = PeerLost("lost", group=group.group_name, peer=1)
        return child._blamed(error)

    assert run_ranks(3, body) == [None, 2, 2]
    assert child._blamed(PeerLost("lost", group="gone", peer=1)) == 1
