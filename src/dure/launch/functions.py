"""Functions as ranks: `dure.spawn`, the way in from a notebook.

Each rank is a process that calls the function, with the variables, store, key and supervision that
a program of `dure run` gets; only the program is missing. There are two ways:

- *fork*: the rank is a copy of this process. It starts at once and has all that the notebook has.
- *spawn*: the rank is a new interpreter (with torch imported once for all, where this process has
  it), and gets the function by cloudpickle: what `__main__` defines goes by value, what modules
  define by name, with this process's `sys.path`.

A fork copies one thread and all memory. Locks that other threads hold stay shut for ever, a CUDA
context does not survive, and autograd refuses to run in a copy of a process where it has run. So a
fork is chosen only if neither CUDA nor autograd has been used here, and no library has threads of
its own (those that are known to do no harm in a copy, which never uses them, are ZeroMQ's and
Python's).

Results come back as pickles in a directory of this user's alone, which is removed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal  # Any: what the user's function takes and returns

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from dure import env
from dure.errors import LaunchError, UsageError
from dure.launch.job import run_job
from dure.launch.spec import JobSpec, Line

__all__ = ["spawn"]

_HARMLESS = ("ZMQ",)  # how names of threads begin that a copy does without


def spawn(
    fn: Callable[..., Any],
    nproc: int = 2,
    args: Sequence[Any] = (),
    start: Literal["fork", "spawn"] | None = None,
) -> list[Any]:
    """Call a function on several ranks of this host, and return what each of them returned.

    Made for notebooks; it works wherever `run_job` does, on the main thread. What ranks print is
    printed here, with the rank in front. The function makes its process group as a program does:
    `dure.init_process_group()` needs no arguments.

    Args:
        fn: What each rank calls. A spawned rank gets it by cloudpickle.
        nproc: How many ranks.
        args: Its arguments, the same for all ranks.
        start: "fork" or "spawn"; None: fork where that is safe (neither CUDA nor autograd was used,
            and no library has threads), else spawn.

    Returns:
        The results in the order of ranks; None of a rank that ended without one (`os._exit(0)`).

    Raises:
        LaunchError: A rank failed. Its traceback is the error's cause, `report` its result; the
            other ranks have been ended.
        UsageError: `start="fork"` is not safe here (the message says why), or there is no memory
            for so many ranks.
        KeyboardInterrupt: Ctrl-C, or "interrupt the kernel"; no rank is left.

    Cost: some 50 ms to start for forked ranks; spawned ones start as with `dure run`.
    """
    why_not = None if start == "spawn" else _why_not_fork()
    if start == "fork" and why_not is not None:
        raise UsageError("this process cannot be forked", seen=why_not, fix='Use start="spawn".')
    torch = "torch" in sys.modules
    with tempfile.TemporaryDirectory(prefix="dure_spawn_") as directory:
        forks = why_not is None and start != "spawn"
        call = partial(_call, fn, args, directory) if forks else None
        if not forks:
            content = cloudpickle.dumps((fn, tuple(args), sys.path))
            Path(directory, "call").write_bytes(content)
        spec = JobSpec(
            program="dure.launch.functions",
            kind="module",
            args=(directory,),
            nproc=nproc,
            call=call,
            preload=("torch",) if torch else (),
            stdin="none",
            on_line=_show,
            quiet=True,
        )
        result = run_job(spec)
        if result.interrupted_by == signal.SIGINT:
            raise KeyboardInterrupt
        failure = result.first_failure
        try:
            result.check()
        except LaunchError as error:
            crash = None if failure is None else failure.crash
            if failure is None or crash is None:
                raise
            told = f"on rank {failure.rank}:\n{crash.traceback.rstrip()}\n{crash.hint}"
            raise error from RuntimeError(told.rstrip())
        return [_result(Path(directory, str(rank))) for rank in range(nproc)]


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _show(line: Line) -> None:
    """Show a line where this process prints, which in a notebook is below the cell."""
    stream = sys.stdout if line.stream == "stdout" else sys.stderr
    stream.write(f"[{line.rank}] {line.text.decode(errors='replace')}\n")
    stream.flush()


def _call(fn: Callable[..., Any], args: Sequence[Any], directory: str) -> None:
    """In a rank: call the function, and leave its result for the launcher."""
    result = fn(*args)
    try:
        data = pickle.dumps(result)
    except Exception:  # what __main__ defines, in a process whose __main__ is another
        data = cloudpickle.dumps(result)
    Path(directory, str(env.integer("RANK"))).write_bytes(data)


def _why_not_fork() -> str | None:
    """Return why a copy of this process would not do as a rank; None if it would."""
    if threading.current_thread() is not threading.main_thread():
        return "this is not the main thread"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is in use"
    if torch is not None and torch._C._autograd._get_sequence_nr() > 0:
        return "autograd was used"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: we look
        pid = os.fork()  # before which OpenBLAS ends its threads, until it needs them again
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    mine = {thread.native_id for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            if int(task) not in mine and not name.startswith(_HARMLESS):
                return f"a library has threads of its own ({name!r})"
    return None


def main() -> None:
    """In a spawned rank: call what the launcher's process has left."""
    directory = sys.argv[1]
    sys.excepthook = lambda *_: None  # the error is raised where `spawn` was called
    call, args, sys.path[:] = pickle.loads(Path(directory, "call").read_bytes())
    _call(call, args, directory)


if __name__ == "__main__":
    main()
