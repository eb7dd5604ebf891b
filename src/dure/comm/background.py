"""Tasks in the background of a rank, such as a save: none is cut off, and no error is lost.

A task is a thread that may use groups, and a future of what it returns. If the program does not
wait for the future, this module does:

- `destroy_process_group` waits for the tasks that use the groups it closes, before it closes them.
  An error that the program has not seen is raised there.
- When groups are aborted, their tasks fail. The program has an error already, so theirs is logged.
- When the process ends, the tasks that are left are waited for. An unseen error is printed, and the
  exit code is 1. A process that is killed or calls `os._exit` waits for nothing.

No wait has a limit of its own: the thread's operations have the timeouts of their groups, and fail
when a peer dies.

A forked child has no tasks: its parent's threads do the work.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from dure.comm.group import ProcessGroup
from dure.comm.world import World, current_world
from dure.errors import UsageError
from dure.store.lifetime import at_process_end
from dure.trace import logs

__all__ = [
    "BackgroundTask",
    "abandon_tasks",
    "finish_at_exit",
    "finish_tasks",
    "raise_first",
    "wait_for_tasks",
]

_log = logs.logger("comm")
_LAST = 10_000  # after the actions of all others

T = TypeVar("T")


class BackgroundTask(Future[T]):
    """A future of what a thread returns.

    Threads:
        Every method may be called from any thread; `start` once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        """Whether the program has asked for the result, or an error was reported."""
        self.world: World = current_world()
        self.groups: tuple[ProcessGroup, ...] = ()
        self.subject: object = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        run: Callable[[], T],
        name: str,
        groups: Iterable[ProcessGroup] = (),
        subject: object = None,
    ) -> None:
        """Call `run` in a thread.

        Args:
            run: The work; it sees the context variables of the caller.
            name: The thread's.
            groups: Groups that must not be destroyed before its end.
            subject: The object that it works on, for `wait_for_tasks`.
        """
        self.groups, self.subject = tuple(groups), subject
        self.set_running_or_notify_cancel()  # from here on it cannot be canceled
        context = copy_context()  # it identifies a rank that is a thread
        self._thread = threading.Thread(target=context.run, args=(self._run, run), name=name)
        _tasks[self] = None
        try:
            self._thread.start()
        except BaseException:  # the system has no more threads
            _tasks.pop(self, None)
            raise

    def _run(self, run: Callable[[], T]) -> None:
        try:
            result = run()
        except BaseException as e:  # the future raises it
            self.set_exception(e)
        else:
            _tasks.pop(self, None)
            self.set_result(result)

    def join(self) -> None:
        """Wait for the end of the thread; do not wait in a callback, which this thread runs."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def unseen_error(self) -> BaseException | None:
        """Wait for the end; return an error that the program has not seen, and count it as seen."""
        self.join()
        _tasks.pop(self, None)
        if self.seen or not self.done():
            return None
        return self.exception()

    def result(self, timeout: float | None = None) -> T:
        """Return what the thread returned, or raise what it raised; wait for it."""
        try:
            return super().result(timeout)
        finally:
            self.seen = self.seen or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what the thread raised, or None; wait for it."""
        error = super().exception(timeout)
        self.seen = True
        return error

    def leave_to_parent(self) -> None:
        """Fail, in a forked child, which has no such thread."""
        self._condition = threading.Condition()  # another thread may have held the parent's
        if not self.done():
            self.seen = True
            self._done_callbacks.clear()  # the parent calls them  # pyright: ignore
            self._waiters.clear()
            self.set_exception(
                UsageError(
                    "the task in the background belongs to the parent process",
                    fix="Wait for it in the process that started it.",
                )
            )


_tasks: dict[BackgroundTask[Any], None] = {}
"""Those that run, or have failed unseen, oldest first. Each access is atomic in Python."""


def _of(world: World, group: ProcessGroup | None = None) -> list[BackgroundTask[Any]]:
    mine = [task for task in list(_tasks) if task.world is world]
    return mine if group is None else [task for task in mine if group in task.groups]


def finish_tasks(world: World, group: ProcessGroup | None = None) -> list[BaseException]:
    """Wait for the tasks of a rank, or for those that use `group`.

    Returns:
        The errors that the program has not seen; they count as seen now.
    """
    errors = [task.unseen_error() for task in _of(world, group)]
    return [error for error in errors if error is not None]


def raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first of several errors, with the others as notes."""
    if errors:
        first, *others = errors
        first.add_note("raised in the background; the program had not asked for the result")
        for other in others:
            first.add_note(f"also in the background: {type(other).__name__}: {other}")
        failing = sys.exc_info()[1]
        if failing is not None and first.__suppress_context__:  # Python would not show it
            shown = "".join(traceback.format_exception(failing))
            first.add_note(f"raised while the program was failing already:\n{shown}")
        raise first


def abandon_tasks(world: World) -> None:
    """Do not wait for the tasks of a rank whose groups are aborted; log their errors."""
    for task in _of(world):
        _tasks.pop(task, None)
        task.add_done_callback(_log_failure)


def _log_failure(task: Future[Any]) -> None:
    if isinstance(task, BackgroundTask) and not task.seen:
        error = task.exception()
        if error is not None:
            _log.error("a task in the background failed: %s: %s", type(error).__name__, error)


def wait_for_tasks(subject: object) -> None:
    """Wait for the tasks of the calling rank that work on `subject`."""
    for task in _of(current_world()):
        if task.subject == subject:
            task.join()


_ends_badly = False


def finish_at_exit() -> None:
    """Wait for the remaining tasks, print errors, and let the process then exit with code 1."""
    global _ends_badly
    for task in list(_tasks):
        error = task.unseen_error()
        if error is not None:
            _ends_badly = True
            with suppress(OSError, ValueError):  # standard error is closed
                print("An error in the background that the program has not seen:", file=sys.stderr)
                traceback.print_exception(error)
                sys.stderr.flush()
    if _ends_badly and not threading.main_thread().is_alive():  # the interpreter is ending
        with suppress(AttributeError):  # a C library without it
            libc = ctypes.CDLL(None)  # which calls these in reverse order, after Python's end
            libc.__cxa_atexit(libc._exit, ctypes.c_void_p(1), None)
            libc.__cxa_atexit(libc.fflush, None, None)


def _end_badly() -> None:
    """End a child of multiprocessing, or a rank that was forked, with exit code 1."""
    if _ends_badly and threading.main_thread().is_alive() and not _fails_already():
        raise SystemExit(1)


def _fails_already() -> bool:
    """Tell whether the program ends by an exception, which gives an exit code other than 0."""
    error = sys.exc_info()[1]
    return error is not None and not (isinstance(error, SystemExit) and not error.code)


def _forget_all() -> None:
    global _ends_badly
    _ends_badly = False
    for task in list(_tasks):
        task.leave_to_parent()
    _tasks.clear()


os.register_at_fork(after_in_child=_forget_all)
at_process_end(finish_at_exit, order=-1)
at_process_end(_end_badly, order=_LAST)
