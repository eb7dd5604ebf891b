"""What becomes of tasks in the background when their process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

import dure
from dure.comm.background import BackgroundTask, finish_tasks, raise_first
from dure.comm.world import current_world
from dure.errors import LaunchError, UsageError
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


def _end(how, path):
    task = BackgroundTask()
    if how == "runs":
        task.start(lambda: path.write_text("finished"), "task")
        return
    task.start(_break, "task")
    if how == "seen":
        task.exception()
    elif how == "exits":
        sys.exit(0)
    elif how == "fails":
        sys.exit(3)
    elif how == "raises":
        raise KeyError("of the program")


@pytest.mark.parametrize(
    ("how", "code"),
    [("runs", 0), ("seen", 0), ("unseen", 1), ("exits", 1), ("fails", 3), ("raises", 1)],
)
def test_a_child_of_multiprocessing_does_so_too(tmp_path, how, code):
    child = start_server().Process(target=_end, args=(how, tmp_path / "made"))
    child.start()
    child.join(PATIENCE_S)
    assert child.exitcode == code
    assert how != "runs" or (tmp_path / "made").read_text() == "finished"


def _ask_in_a_fork(pipe):
    """Send what a fork finds out of a task that its parent's thread does."""
    gate, task, called = threading.Event(), BackgroundTask(), []
    task.add_done_callback(called.append)
    task.start(gate.wait, "task")
    child = os.fork()
    if child:
        gate.set()
        os.waitpid(child, 0)
        return
    pipe.send((task.done(), type(task.exception()), finish_tasks(current_world()), len(called)))
    os._exit(0)


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


def test_a_fork_does_not_wait_for_the_tasks_of_its_parent():
    assert _answer(_ask_in_a_fork) == (True, UsageError, [], 0)


def _error(cause):
    """Return an error that was raised from a cause, as those of checkpoints are."""
    try:
        raise OSError("no space for the task") from cause
    except OSError as error:
        return error


@pytest.mark.parametrize("cause", [None, ValueError("the cause")], ids=repr)
def test_the_error_that_the_program_fails_by_is_shown_first(cause):
    error = _error(cause)

    def end():
        try:
            raise KeyError("of the program")
        finally:
            raise_first([error])

    with pytest.raises(OSError, match="no space") as raised:
        end()
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.index("KeyError: 'of the program'") < shown.index("OSError: no space")
    assert cause is None or "ValueError: the cause" in shown


def _start_failing():
    BackgroundTask().start(_break, "task")


def _spawn(pipe):
    try:
        pipe.send(dure.spawn(_start_failing, nproc=1))
    except LaunchError as e:
        pipe.send(str(e))


def test_spawn_raises_for_an_error_that_the_function_has_not_seen():
    assert "exit code 1" in _answer(_spawn)
