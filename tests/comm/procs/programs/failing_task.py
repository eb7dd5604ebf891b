"""Forks a child for each way in which a program with a task in the background ends."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from dure.comm.background import BackgroundTask


def _break() -> None:
    raise OSError("no space for the task")


def _finish(path: Path) -> None:
    threading.main_thread().join()
    path.write_text("finished")


def _started(run, *args) -> BackgroundTask:
    task = BackgroundTask()
    task.start(lambda: run(*args), "task")
    return task


def _unseen() -> None:
    _started(_break).join()


def _raises() -> None:
    _unseen()
    raise KeyError("of the program")


def _runs() -> None:
    _started(_finish, Path(sys.argv[1]))


def main() -> None:
    """Print how each child ended. A child leaves here, and ends as a program does."""
    for case in (_unseen, _raises, _runs):
        child = os.fork()
        if child == 0:
            case()
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(case.__name__, code, flush=True)


main()
