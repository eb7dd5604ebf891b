"""What becomes of tasks in the background when their process ends."""

import subprocess
import sys
from pathlib import Path

import dure
from dure.comm.background import BackgroundTask
from dure.errors import LaunchError
from dure.testing.pool import start_server
from tests.waiting import PATIENCE_S

PROGRAMS = Path(__file__).parent / "programs"


def test_a_program_ends_with_code_1_for_an_error_that_it_has_not_seen(tmp_path):
    made = tmp_path / "made"
    command = [sys.executable, PROGRAMS / "failing_task.py", made]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert dict(line.split() for line in ended.stdout.splitlines()) == {
        "_unseen": "1",
        "_raises": "1",
        "_runs": "0",
    }
    assert made.read_text() == "finished"
    assert ended.stderr.count("OSError: no space for the task") == 2
    assert ended.stderr.count("KeyError: 'of the program'") == 1
    assert ended.returncode == 0


def _break():
    raise OSError("no space for the task")


def _answer(target):
    """Return what `target` sends from a process without threads, which then ends well."""
    context = start_server()
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there,))
    process.start()
    assert here.poll(PATIENCE_S)
    answer = here.recv()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    return answer


def _start_failing():
    BackgroundTask().start(_break, "task")


def _spawn(pipe):
    try:
        pipe.send(dure.spawn(_start_failing, nproc=1))
    except LaunchError as e:
        pipe.send(str(e))


def test_spawn_raises_for_an_error_that_the_function_has_not_seen():
    assert "exit code 1" in _answer(_spawn)
