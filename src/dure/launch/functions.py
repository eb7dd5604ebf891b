"""Functions as ranks: `dure.spawn`, the way in from a notebook.

Each rank is a process that calls the function, with the variables, store, key and supervision that
a program of `dure run` gets; only the program is missing. There are two ways:

- *fork*: the rank is a copy of this process. It starts at once and has all that the notebook has.
- *spawn*: the rank is a new interpreter (with torch imported once for all, where this process has
  it), and gets the function by cloudpickle: definitions of `__main__` go by value, those of modules
  by name. It gets this process's `sys.path` before that. The rank's `__main__` has the
  definitions that came by value, so that pickle finds them by name there.

A fork copies one thread and all memory. Locks that other threads hold are never released, a CUDA
context does not survive, and autograd refuses to run in a copy of a process where it has run. So a
fork is chosen only if neither CUDA nor autograd has been used here, and no library has threads of
its own (those that are known to do no harm in a copy, which never uses them, are ZeroMQ's and
Python's).

The call and the results are pickles in anonymous memory of this process, which ranks open by its
place below /proc.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal  # Any: arguments and results of the user's function

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from dure import env
from dure.errors import LaunchError, UsageError
from dure.launch.job import run_job
from dure.launch.ranks.forking import device_in_use
from dure.launch.ranks.spawn import open_descriptors
from dure.launch.spec import JobResult, JobSpec, Line
from dure.store.system import memory_file

__all__ = ["call_function", "results_of_ranks", "spawn"]

_PROGRAM = str(Path(__file__).with_name("function_rank"))
_HARMLESS = ("ZMQ",)  # how names of threads begin that a copy does without


def spawn(
    fn: Callable[..., Any],
    nproc: int = 2,
    args: Sequence[Any] = (),
    start: Literal["fork", "spawn"] | None = None,
    **settings: Any,
) -> list[Any]:
    """Call a function on several ranks, and return what each rank of this host returned.

    Made for notebooks; it works wherever `run_job` does, on the main thread. The output of ranks is
    printed here, with the rank in front. The function makes its process group as a program does:
    `dure.init_process_group()` needs no arguments.

    Args:
        fn: The function that each rank calls. A spawned rank gets it by cloudpickle.
        nproc: How many ranks, on this host.
        args: Its arguments, the same for all ranks.
        start: "fork" or "spawn"; None: fork where that is safe (neither a device nor autograd was
            used, and no library has threads), else spawn.
        settings: Fields of `JobSpec`: `env`, `log_dir`, `max_restarts`, `hang_timeout_s`,
            `on_event` and others. With `nnodes` and `endpoint` the ranks are on several hosts, each
            of which calls `spawn`.

    Returns:
        The results in the order of ranks; None of a rank that ended without one (`os._exit(0)`).

    Raises:
        LaunchError: A rank failed. Its traceback is the error's cause, `report` its result; the
            other ranks have been ended.
        UsageError: `start="fork"` is not safe here (the message says why), there is no memory for
            so many ranks, or this is a process of multiprocessing that still imports its main
            module, which would start ranks without end.
        KeyboardInterrupt: Ctrl-C, or "interrupt the kernel"; no rank is left.

    Cost:
        Some 50 ms to start for forked ranks; spawned ones start as with `dure run`.

    Example:
        ```python
        import os

        if dist.get_rank() == 0:  # one process calls, such as a notebook
            ranks = dist.spawn(os.getenv, nproc=3, args=("RANK",))
            assert ranks == ["0", "1", "2"]
        ```
    """
    results = results_of_ranks(fn, nproc, args, start, **settings)
    return [results[rank] for rank in sorted(results)]


def results_of_ranks(
    fn: Callable[..., Any],
    nproc: int,
    args: Sequence[Any],
    start: Literal["fork", "spawn"] | None,
    **settings: Any,
) -> dict[int, Any]:
    """Do what `spawn` does, and return the results by rank."""
    if getattr(current_process(), "_inheriting", False):
        raise UsageError(
            "this process has not yet imported its main module",
            seen="multiprocessing imports it in each process that it spawns",
            fix='Call spawn below `if __name__ == "__main__":`.',
        )
    if start not in (None, "fork", "spawn"):
        raise UsageError('start must be "fork", "spawn" or None', seen=repr(start))
    why_not = None if start == "spawn" else _why_not_fork()
    if start == "fork" and why_not is not None:
        raise UsageError("this process cannot be forked", seen=why_not, fix='Use start="spawn".')
    forks = why_not is None and start != "spawn"
    with contextlib.ExitStack() as files:
        call, *results = [_memory(files) for _ in range(nproc + 1)]
        key = bytes(current_process().authkey)  # for the program's managers and listeners
        if not forks:
            call.write(_pickled(key, fn, args))
            call.flush()
        paths = tuple(f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (call, *results))
        spec = JobSpec(
            program=_PROGRAM,
            args=paths,
            nproc=nproc,
            call=partial(_copied, key, fn, args, paths[1:]) if forks else None,
            kept_fds=open_descriptors(),
            preload=("torch",) if "torch" in sys.modules else (),
            stdin="none",
            on_line=_show,
            quiet=True,
            **settings,
        )
        _check(run_job(spec))
        one_host = spec.nnodes == (1, 1)
        found: dict[int, Any] = dict.fromkeys(range(nproc), None) if one_host else {}
        for file in results:
            if data := file.read():
                found.update(pickle.loads(data))
        return found


def _memory(files: contextlib.ExitStack) -> BinaryIO:
    """Make anonymous memory, which is released when `files` are closed."""
    return files.enter_context(open(memory_file("dure-spawn"), "r+b"))


def _check(result: JobResult) -> None:
    """Raise the error of a job that failed, with the traceback of the rank as its cause."""
    if result.interrupted_by == signal.SIGINT:
        raise KeyboardInterrupt
    failure = result.first_failure
    try:
        result.check()
    except LaunchError as error:
        crash = None if failure is None else failure.crash
        if failure is None or crash is None:
            raise
        text = f"on rank {failure.rank}:\n{crash.traceback.rstrip()}"
        raise error from RuntimeError(text)


class _Pickler(cloudpickle.Pickler):
    """Collects what `__main__` defines and pickles by value."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.defined: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            return reduced
        name = str(getattr(obj, "__name__", ""))  # of a function, class or module
        if vars(sys.modules["__main__"]).get(name) is obj:
            self.defined[name] = obj
        return reduced


def _pickled(key: bytes, fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Return what a spawned rank reads: its search path, the call, and names of `__main__`."""
    file = io.BytesIO()
    path = [entry for entry in sys.path if isinstance(entry, str)]  # import skips others, too
    pickle.dump((path, sys.argv, key), file)
    pickler = _Pickler(file)
    pickler.dump((fn, tuple(args)))
    pickler.dump(pickler.defined)
    return file.getvalue()


def _show(line: Line) -> None:
    """Show a line where this process prints, which in a notebook is below the cell."""
    stream = sys.stdout if line.stream == "stdout" else sys.stderr
    stream.write(f"[{line.rank}] {line.text.decode(errors='replace')}\n")
    stream.flush()


def _copied(
    key: bytes, fn: Callable[..., Any], args: Sequence[Any], results: Sequence[str]
) -> None:
    """In a forked rank: call the function."""
    current_process().authkey = key
    _call(fn, args, results)


def _call(fn: Callable[..., Any], args: Sequence[Any], results: Sequence[str]) -> None:
    """In a rank: call the function, and leave its result for the launcher.

    Ranks of a host have successive numbers, so each has a file of its own.
    """
    rank = env.integer("RANK") or 0
    result = {rank: fn(*args)}
    try:
        data = pickle.dumps(result)
    except Exception:  # what __main__ defines, in a process whose __main__ is another
        data = cloudpickle.dumps(result)
    Path(results[rank % len(results)]).write_bytes(data)


def _why_not_fork() -> str | None:
    """Return why a copy of this process would not do as a rank; None if it would."""
    if threading.current_thread() is not threading.main_thread():
        return "this is not the main thread"
    torch: Any = sys.modules.get("torch")
    if (device := device_in_use()) is not None:
        return f"{device} is in use"
    if torch is not None and torch._C._autograd._get_sequence_nr() > 0:
        return "autograd was used"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: we look
        pid = os.fork()  # before which OpenBLAS ends its threads, until it needs them again
    if pid == 0:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored
        os.waitpid(pid, 0)
    mine = {thread.native_id for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            if int(task) not in mine and not name.startswith(_HARMLESS):
                return f"a library has threads of its own ({name!r})"
    return None


def call_function(file: BinaryIO, argv: list[str], key: bytes, results: Sequence[str]) -> None:
    """In a spawned rank, which has read the first of `_pickled`: read the rest, and call."""
    sys.excepthook = lambda *_: None  # the error is raised where `spawn` was called
    sys.argv[:] = argv
    current_process().authkey = key
    module = ModuleType("__main__")
    module.__spec__ = None  # processes that the rank starts by multiprocessing look at it
    sys.modules["__dure_functions__"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    unpickler = pickle.Unpickler(file)
    fn, args = unpickler.load()
    vars(module).update(unpickler.load())
    _call(fn, args, results)
