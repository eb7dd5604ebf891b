"""Functions as ranks: `dure.spawn`, the way in from a notebook.

Each rank is a process that calls the function, with the variables, store, key and supervision that
a program of `dure run` gets; only the program is missing. There are two ways:

- *fork*: the rank is a copy of this process. It starts at once and has all that the notebook has.
- *spawn*: the rank is a new interpreter (with torch imported once for all, where this process has
  it), and gets the function by cloudpickle: what `__main__` defines goes by value, what modules
  define by name. What an import by name needs is restored before the function is unpickled: this
  process's `sys.path`, and the folders of its modules that are no longer on that path. The rank's
  `__main__` has the definitions that came by value, so that pickle finds them by name there.

A fork copies one thread and all memory. Locks that other threads hold stay shut for ever, a CUDA
context does not survive, and autograd refuses to run in a copy of a process where it has run. So a
fork is chosen only if neither CUDA nor autograd has been used here, and no library has threads of
its own (those that are known to do no harm in a copy, which never uses them, are ZeroMQ's and
Python's).

Results come back as pickles in a directory of this user's alone, which is removed.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from multiprocessing import current_process
from pathlib import Path
from types import ModuleType
from typing import (
    Any,
    Literal,
    TypedDict,
    Unpack,
)  # Any: what the user's function takes and returns

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from dure import env
from dure.errors import LaunchError, UsageError
from dure.launch.job import run_job
from dure.launch.ranks.errorfiles import temporary_folder
from dure.launch.ranks.forking import home_of
from dure.launch.ranks.spawn import open_descriptors
from dure.launch.spec import JobResult, JobSpec, Line, StreamChoice
from dure.trace.plain_files import read_plain

__all__ = ["SpawnSettings", "results_of_ranks", "spawn"]

_PATH = "PYTHONPATH"
_NEEDED_FIRST = ("cloudpickle", "dure", "numpy", "torch", "typing_extensions")
_GUARD = re.compile(rb"""__name__\s*==\s*["']__main__["']|["']__main__["']\s*==\s*__name__""")
_MOST_BYTES = 16 << 20  # of a program
_HARMLESS = ("ZMQ",)  # how names of threads begin that a copy does without


class SpawnSettings(TypedDict, total=False):
    """Settings of `spawn`; `JobSpec` says what each does."""

    env: Mapping[str, str | None]
    log_dir: Path | None
    max_restarts: int
    longest_restart_delay_s: float
    hang_timeout_s: float | None
    on_event: Callable[[Mapping[str, object]], object] | None
    event_log: Path | None
    grace_s: float | None
    nnodes: tuple[int, int]
    node_rank: int | None
    endpoint: str | None
    local_addr: str | None
    run_id: str | None
    rdzv_backend: Literal["c10d", "static", "etcd"]
    rdzv_conf: Mapping[str, str]
    join_timeout_s: float
    role: str
    redirects: StreamChoice
    tee: StreamChoice
    stdout_filters: tuple[str, ...]
    stderr_filters: tuple[str, ...]
    virtual_local_rank: bool
    signals: tuple[int, ...]


def spawn(
    fn: Callable[..., Any],
    nproc: int = 2,
    args: Sequence[Any] = (),
    start: Literal["fork", "spawn"] | None = None,
    **settings: Unpack[SpawnSettings],
) -> list[Any]:
    """Call a function on several ranks, and return what each rank of this host returned.

    Made for notebooks; it works wherever `run_job` does, on the main thread. What ranks print is
    printed here, with the rank in front. The function makes its process group as a program does:
    `dure.init_process_group()` needs no arguments.

    Args:
        fn: What each rank calls. A spawned rank gets it by cloudpickle.
        nproc: How many ranks, on this host.
        args: Its arguments, the same for all ranks.
        start: "fork" or "spawn"; None: fork where that is safe (neither CUDA nor autograd was used,
            and no library has threads), else spawn.
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

    Cost: some 50 ms to start for forked ranks; spawned ones start as with `dure run`.
    """
    results = results_of_ranks(fn, nproc, args, start, **settings)
    return [results[rank] for rank in sorted(results)]


def results_of_ranks(
    fn: Callable[..., Any],
    nproc: int,
    args: Sequence[Any],
    start: Literal["fork", "spawn"] | None,
    **settings: Unpack[SpawnSettings],
) -> dict[int, Any]:
    """Do what `spawn` does, and return the results by rank."""
    if getattr(current_process(), "_inheriting", False):
        raise UsageError(
            "this process has not yet imported its main module",
            seen="multiprocessing imports it in each process that it spawns",
            fix='Call spawn below `if __name__ == "__main__":`.',
        )
    why_not = None if start == "spawn" else _why_not_fork()
    if start == "fork" and why_not is not None:
        raise UsageError("this process cannot be forked", seen=why_not, fix='Use start="spawn".')
    torch = "torch" in sys.modules
    with temporary_folder(f"spawn_{uuid.uuid4().hex}") as folder:
        directory = str(folder)
        forks = why_not is None and start != "spawn"
        call = partial(_copied, _key(), fn, args, directory) if forks else None
        path = _search_path()
        if not forks:
            Path(directory, "call").write_bytes(_pickled(fn, args, path))
        variables = {} if forks else {_PATH: os.pathsep.join(_path_to_start(path))}
        settings["env"] = {**variables, **settings.get("env", {})}
        spec = JobSpec(
            program="dure.launch.function_rank",
            kind="module",
            args=(directory,),
            nproc=nproc,
            call=call,
            kept_fds=open_descriptors(),
            preload=("torch",) if torch else (),
            stdin="none",
            on_line=_show,
            quiet=True,
            **settings,
        )
        _check(run_job(spec))
        ranks = range(nproc)
        if spec.nnodes != (1, 1):  # the ranks of this host have left their results here
            ranks = [int(name) for name in os.listdir(directory) if name.isdigit()]
        return {rank: _result(Path(directory, str(rank))) for rank in ranks}


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
        text = f"on rank {failure.rank}:\n{crash.traceback.rstrip()}\n{crash.hint}"
        raise error from RuntimeError(text.rstrip())


def _search_path() -> list[str]:
    """Return `sys.path`, and the folders of imported modules that it does not lead to.

    A program may have taken a folder off the path after an import, or changed its directory.
    """
    path = [entry for entry in sys.path if isinstance(entry, str)]  # import skips others, too
    known = {os.path.realpath(entry) for entry in path}
    for name, module in list(sys.modules.items()):
        home = None if "." in name or name == "__main__" else home_of(module)
        if home is not None and os.path.realpath(home) not in known:
            known.add(os.path.realpath(home))
            path.append(os.path.abspath(home))
    return path


def _path_to_start(path: list[str]) -> list[str]:
    """Return the part of a path with which a rank gets as far as to set the complete one.

    What the program has put on the path may hide modules that interpreters start with.
    """
    modules = (sys.modules.get(name) for name in _NEEDED_FIRST)
    homes = {os.path.realpath(home_of(module) or "") for module in modules if module is not None}
    given = (env.raw(_PATH) or "").split(os.pathsep)
    return [
        os.path.abspath(entry)
        for entry in path
        if os.path.realpath(entry) in homes or entry in given
    ]


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


def _pickled(fn: Callable[..., Any], args: Sequence[Any], path: list[str]) -> bytes:
    """Return what a spawned rank reads: what imports need, the call, and names of `__main__`."""
    main = sys.modules["__main__"]
    spec: ModuleSpec | None = getattr(main, "__spec__", None)
    place = (getattr(main, "__file__", None), None if spec is None else spec.name)
    if not _is_guarded(place[0]):
        place = (None, None)
    needed = (path, sys.argv, env.raw(_PATH), place, _key())
    file = io.BytesIO()
    file.write(pickle.dumps(needed))
    pickler = _Pickler(file)
    pickler.dump((fn, tuple(args)))
    pickler.dump(pickler.defined)
    return file.getvalue()


def _is_guarded(file: str | None) -> bool:
    """Tell whether a program can be imported without being run."""
    with contextlib.suppress(OSError):
        return file is not None and _GUARD.search(read_plain(file, _MOST_BYTES)) is not None
    return False


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _show(line: Line) -> None:
    """Show a line where this process prints, which in a notebook is below the cell."""
    stream = sys.stdout if line.stream == "stdout" else sys.stderr
    stream.write(f"[{line.rank}] {line.text.decode(errors='replace')}\n")
    stream.flush()


def _key() -> bytes:
    """Return the key of this program's processes, which ranks get as multiprocessing's do.

    With it they can use the program's managers and listeners, and they share its locks on folders
    of checkpoints (`dure.checkpoint.lock`).
    """
    return bytes(current_process().authkey)


def _copied(key: bytes, fn: Callable[..., Any], args: Sequence[Any], directory: str) -> None:
    """In a forked rank: call the function."""
    current_process().authkey = key
    _call(fn, args, directory)


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
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored
        os.waitpid(pid, 0)
    mine = {thread.native_id for thread in threading.enumerate()}
    try:
        tasks = os.listdir("/proc/self/task")
    except OSError as error:
        return f"its threads are not known: {error.filename}: {error.strerror}"
    for task in tasks:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            if int(task) not in mine and not name.startswith(_HARMLESS):
                return f"a library has threads of its own ({name!r})"
    return None


def main() -> None:
    """In a spawned rank: call what the launcher's process has left."""
    directory = sys.argv[1]
    sys.excepthook = lambda *_: None  # the error is raised where `spawn` was called
    with Path(directory, "call").open("rb") as file:
        sys.path[:], sys.argv[:], variable, place, current_process().authkey = pickle.load(file)
        env.put(_PATH, variable)
        module = _stand_in(*place)
        unpickler = pickle.Unpickler(file)
        call, args = unpickler.load()
        vars(module).update(unpickler.load())
    _call(call, args, directory)


def _stand_in(file: str | None, name: str | None) -> ModuleType:
    """Replace `__main__` by a module for the names of the caller's, and return it.

    With its file and name, processes that the rank starts by multiprocessing's "spawn" find the
    caller's main module as they would find it from there. They import it, so it has neither if that
    would run the program again.
    """
    module = ModuleType("__main__")
    if file is not None:
        module.__file__ = file
    module.__spec__ = None if name is None else ModuleSpec(name, None)
    sys.modules["__dure_functions__"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    return module
