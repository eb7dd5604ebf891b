"""The bootstrap of a rank: becomes the user's program, and reports to the launcher how it ends.

The launcher runs this file by its path, in a fresh interpreter:

    python .../child.py REPORT_FD LAUNCHER_PID BINDING KIND PROGRAM ARGS...

It then does what `python PROGRAM ARGS` or `python -m PROGRAM ARGS` would do: `sys.argv`,
`sys.path[0]` and the module `__main__` are what the program expects. Four things are added:

1. The kernel ends this process when the launcher dies, also by SIGKILL (PR_SET_PDEATHSIG).
2. An exception that leaves the program is written to REPORT_FD, a pipe to the launcher, as one
   line of JSON, before it is printed as usual. A pipe leaves nothing on disk.
3. On the signal STACK_SIGNAL, faulthandler writes the main thread's Python stack to the same pipe.
   That handler runs in C at once, so it answers even while the program is stuck in native code.
   Once the program has a process group, `dure.trace.line` adds the last operation.
4. The traceback is printed in one piece, and before the report: the launcher may end the rank as
   soon as it has that. If Dure itself has raised the error, the traceback ends with the user's
   line; DURE_TRACEBACK=full shows all of it.

Ranks that are forked from a zygote (`forking.py`) continue here with `become`.

This file imports nothing of Dure, so that a rank starts as quickly as a plain interpreter. Its
directory is first on `sys.path` while its imports below run: no file beside it may have the name of
one of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

STACK_SIGNAL = signal.SIGRTMAX - 3
"""Real-time signals are hardly used by programs; the highest few are used least."""
RECORD_SIGNAL = signal.SIGRTMAX - 4
"""Asks a rank for its flight record. Programs may have a handler of their own for SIGUSR2."""

_OPTIONS = sys.orig_argv[1 : -len(sys.argv)]  # the interpreter's own, such as -O
_PR_SET_PDEATHSIG = 1
_HERE = os.path.dirname(__file__)
_BOOTSTRAP = (
    *(os.path.join(_HERE, name) for name in ("child.py", "forking.py", "spawn.py")),
    os.path.join(os.path.dirname(_HERE), "functions.py"),
    os.path.join(os.path.dirname(_HERE), "function_rank", "__main__.py"),
    "<frozen runpy>",
)
_DURE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_NATIVE_THREADS_S = 0.01
_MAX_TEXT = 8_000  # characters; two such texts fit into a pipe, so the dying rank never waits


def main() -> None:
    """Become the program that the command line names."""
    fd, launcher, binding, kind, program, *args = sys.argv[1:]
    report_fd = int(fd)
    die_with(int(launcher))
    if binding:
        _bind(binding)
    os.set_inheritable(report_fd, False)
    if kind == "executable":
        os.execvp(program, [program, *args])
    become(report_fd, kind, program, args)


def _bind(binding: str) -> None:
    """Bind this process to cpus ("0,1"), or as torch does it near a GPU ("exclusive:0")."""
    mode, _, gpu = binding.partition(":")
    if not gpu:
        os.sched_setaffinity(0, map(int, binding.split(",")))
        return
    here = sys.path.pop(0)  # which has names that an import of torch may look for
    from torch.numa import binding as numa  # lazy: few ranks are bound so

    sys.path.insert(0, here)
    options = numa.NumaOptions(affinity_mode=numa.AffinityMode(mode))
    numa._maybe_apply_numa_binding_to_current_process(  # pyright: ignore[reportPrivateUsage]
        gpu_index=int(gpu), numa_options=options
    )


def become(report_fd: int, kind: str, program: str, args: list[str]) -> None:
    """Run the program as `__main__`, and report the exception that leaves it, if any."""
    sys.argv[:] = [program, *args]
    sys.orig_argv[1:] = [*_OPTIONS, *(["-m"] if kind == "module" else []), program, *args]
    me, pipe = os.getpid(), os.fstat(report_fd)
    _publish(report_fd)
    try:
        faulthandler.register(STACK_SIGNAL, file=report_fd, all_threads=False, chain=False)
        try:
            (_run_module if kind == "module" else _run_script)(program)
        finally:
            _let_native_threads_finish()
    except BaseException as error:
        _print_traceback(error)
        if os.getpid() == me and _is_same_file(report_fd, pipe):  # else this is a forked child
            _report(report_fd, error)
            if flight := sys.modules.get("dure.trace.flight"):
                flight.on_crash(error)
            if page := sys.modules.get("dure.trace.publishing"):
                page.on_crash(error)
        raise
    if os.getpid() == me and _is_same_file(report_fd, pipe):
        _write(report_fd, {"finished": True})


def _let_native_threads_finish() -> None:
    """Give threads of torch that wait for the interpreter the time to get it.

    One of gloo's does so at the end of an operation, after the program has seen that end. Once the
    interpreter shuts down (before Python 3.14), it ends such a thread, which aborts the process:
    "terminate called without an active exception", in 8 of 60 runs of a short program.
    """
    if "torch.distributed" in sys.modules:
        time.sleep(_NATIVE_THREADS_S)


def run_function(report_fd: int, function: Callable[[], None]) -> int:
    """Call a function in place of a program, and report its error; return the exit code."""
    _publish(report_fd)
    faulthandler.register(STACK_SIGNAL, file=report_fd, all_threads=False, chain=False)
    try:
        function()
    except BaseException as error:
        _report(report_fd, error)
        return _exit_code(error)
    _write(report_fd, {"finished": True})
    return 0


def _publish(report_fd: int) -> None:
    """Let `dure.trace.line`, should the program import it, find the pipe to the launcher."""
    line = ModuleType("__dure_line__")
    line.__dict__.update(fd=report_fd, pid=os.getpid())
    line.__dict__.update(stack_signal=int(STACK_SIGNAL), record_signal=int(RECORD_SIGNAL))
    sys.modules["__dure_line__"] = line


def die_with(launcher: int) -> None:
    """Ask to be killed with the launcher, and exit now if it has died already; 0: no launcher."""
    if launcher == 0:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:
        os._exit(128 + signal.SIGKILL)


def first_path(kind: str, program: str) -> str:
    if kind == "module":
        return os.getcwd()
    if os.path.isdir(program):
        return os.path.abspath(program)
    return os.path.dirname(os.path.realpath(program))


def _run_script(path: str) -> None:
    """Do what `python PATH` does, for a file or for a directory with a `__main__.py`."""
    _set_first_path(first_path("script", path))
    if os.path.isdir(path):
        path = os.path.join(path, "__main__.py")
    absolute = os.path.abspath(path)
    module = _new_main(absolute)
    module.__loader__ = SourceFileLoader("__main__", absolute)
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _run_module(name: str) -> None:
    """Do what `python -m NAME` does."""
    _set_first_path(first_path("module", name))
    sys.argv[0] = "-m"
    _new_main(None)
    import runpy  # lazy: programs that are files have no use for it

    runpy._run_module_as_main(name)  # pyright: ignore


def _set_first_path(directory: str) -> None:
    """Put `directory` where this file's own directory is on `sys.path`."""
    if not sys.flags.safe_path:
        sys.path[0] = directory


def _new_main(file: str | None) -> ModuleType:
    """Put an empty `__main__` in place of this file's, which stays alive under another name."""
    module = ModuleType("__main__")
    module.__file__ = file
    module.__dict__.update(__builtins__=sys.modules["builtins"], __cached__=None)
    module.__annotations__ = {}
    sys.modules["__dure_child__"] = sys.modules["__main__"]
    sys.modules["__main__"] = module
    return module


def _without_bootstrap(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames of those who start ranks from the outer end of a traceback."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _BOOTSTRAP:
        trace = trace.tb_next
    return trace


def _print_traceback(error: BaseException) -> None:
    """Print an error as the interpreter would, without the frames of those who start ranks.

    Nothing is printed for KeyboardInterrupt: on Ctrl-C every rank would print the same, and the
    launcher reports where each of them was. A hook of the program's own is called instead.
    """
    hook = sys.excepthook
    if sys.stderr is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
        if hook is not sys.__excepthook__:
            trace = _without_bootstrap(error.__traceback__)
            hook(type(error), error.with_traceback(trace), trace)
        else:
            with contextlib.suppress(OSError, ValueError):  # closed
                sys.stderr.write(_formatted(error))
    sys.excepthook = lambda *_: None


def _formatted(error: BaseException) -> str:
    trace = _without_bootstrap(error.__traceback__)
    text = traceback.TracebackException(type(error), error, trace, compact=True)
    own = type(error).__module__.partition(".")[0] == "dure"
    frames = [frame for frame in text.stack if not frame.filename.startswith(_DURE)]
    if own and frames and os.environ.get("DURE_TRACEBACK") != "full":
        text.stack[:] = frames
    return "".join(text.format())


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _is_same_file(fd: int, file: os.stat_result) -> bool:
    """Return whether `fd` is still `file`: programs that close everything reuse numbers."""
    try:
        return os.path.samestat(os.fstat(fd), file)
    except OSError:
        return False


def _report(fd: int, error: BaseException) -> None:
    code = _exit_code(error)
    if code == 0:
        _write(fd, {"finished": True})
        return
    crash: dict[str, object] = {
        "type": type(error).__qualname__,
        "message": _text(error)[:_MAX_TEXT],
        "traceback": _formatted(error)[-_MAX_TEXT:],
        "exit_code": code,
        "peer": _blamed(error),
    }
    line = sys.modules.get("dure.trace.line")
    if line is not None:
        line.send_last_operation()
    _write(fd, {"crash": crash})


def _write(fd: int, content: dict[str, object]) -> None:
    line = json.dumps(content, ensure_ascii=False).encode(errors="replace")
    try:
        os.write(fd, b"\n" + line + b"\n")
    except OSError:
        return


def _blamed(error: BaseException) -> int | None:
    """Return the rank of the job that `error` blames; its `peer` is numbered within its `group`."""
    peer, name = getattr(error, "peer", None), getattr(error, "group", None)
    if not isinstance(peer, int):
        return None
    world = sys.modules.get("dure.comm.world")
    group = world.current_world().groups.get(str(name)) if world else None
    if group is None or not 0 <= peer < group.size():
        return peer
    return group.global_ranks[peer]


def _text(error: BaseException) -> str:
    """Return str(error), which runs code of the program and may fail."""
    try:
        return str(error)
    except Exception as second:
        return f"<no message: {type(second).__name__} in __str__>"


if __name__ == "__main__":
    main()
