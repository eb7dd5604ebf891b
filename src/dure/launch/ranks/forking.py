"""The zygote: a process that has imported torch, and forks ranks that need not.

The launcher runs this file by its path, in a fresh interpreter, and talks to it over a socket:

    python .../forking.py SOCKET_FD LAUNCHER_PID KIND PROGRAM ARGS...

    launcher ──setup: what to import──▶ zygote ──▶ why it cannot be used, if so
    launcher ──order: environment, descriptors──▶ zygote ──fork──▶ intermediate ──fork──▶ rank
    launcher ◀──the rank's number── intermediate      (which exits: the launcher adopts the rank)

A rank must be the launcher's own child, so that the launcher can wait for it and the kernel ends it
with the launcher. Hence the intermediate process, and a launcher that adopts orphans. The
intermediate has the socket, too: if the zygote is killed while it forks, either the rank's number
still arrives, or the end of the socket shows that there is no rank.

*When it is safe.* A fork copies one thread and all memory: locks that other threads hold are never
released in it, and a CUDA context does not survive. So, after the imports, the zygote forks once
for trial (OpenBLAS ends its threads when it is forked), counts its threads and children, and
reports why it cannot be forked, if so.

*As a fresh interpreter.* The zygote was started with the variables that interpreters and libraries
read when they start, and with `sys.path` as the program will have it. The rank gets what is left.
The remaining differences are listed in docs/launch.md; why C++ libraries are not taken apart at a
rank's end, and imported objects are frozen, in docs/decisions/0019-zygote.md.

Like `child.py`, this file imports nothing of Dure.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
from types import ModuleType
from typing import Any, TextIO

__all__ = ["receive", "send", "settle"]

_MAX_FDS = 16
_THREAD_END_S = 0.5  # for a thread that has ended to vanish from /proc
_REQUESTS_TO_END = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
_Message = dict[str, Any]  # JSON, both ways: its fields are listed where it is made


def send(link: socket.socket, message: _Message, fds: tuple[int, ...] = ()) -> None:
    socket.send_fds(link, [b"."], fds)
    link.sendall(json.dumps(message).encode() + b"\n")


def receive(link: socket.socket) -> tuple[_Message, list[int]]:
    """Wait for a message and the descriptors that came with it; the sender then awaits an answer.

    Raises:
        EOFError: The other side has closed the socket, or ended.
    """
    mark, fds, _, _ = socket.recv_fds(link, 1, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    text = b""
    while not text.endswith(b"\n"):
        part = link.recv(1 << 20) if mark else b""
        if not part:
            raise EOFError
        text += part
    return json.loads(text), fds


def main() -> None:
    """Import, then fork; only in a rank this continues to the program."""
    link = socket.socket(fileno=int(sys.argv[1]))
    bootstrap = _bootstrap()
    bootstrap.die_with(int(sys.argv[2]))
    before = dict(os.environ)
    try:
        setup, (printed_to,) = receive(link)
        for fd in (1, 2):
            os.dup2(printed_to, fd)
        os.close(printed_to)
        trouble = _preload(setup)
        if trouble is None:
            _skip_native_destructors()
            gc.freeze()
        # A signal to all processes of a job must not end the zygote; the launcher ends it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS_TO_END)
        send(link, {"trouble": trouble})
        if trouble is not None:
            os._exit(0)
        order, fds = _serve(link)
    except (EOFError, OSError):  # the launcher is done, or dead
        os._exit(0)
    link.close()
    report = settle(order, fds, before)
    _remember_environment()
    while os.getppid() == order["intermediate"]:  # then the launcher is the parent
        time.sleep(0.0002)
    bootstrap.die_with(order["launcher"])
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    bootstrap.become(report, order["kind"], order["program"], order["args"])


def _bootstrap() -> ModuleType:
    """Load `child.py`, under a name that no program uses."""
    path = os.path.join(os.path.dirname(__file__), "child.py")
    spec = importlib.util.spec_from_file_location("__dure_bootstrap__", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# --- before the fork ---------------------------------------------------------------------------


def _preload(setup: _Message) -> str | None:
    """Import what the ranks will need; return why none should be forked from here, if so.

    `needed` must import without an error; `wanted` (module or module:name) may fail, as it may in
    the program.
    """
    if not sys.flags.safe_path:
        sys.path[0] = setup["first_path"]
    gc.disable()
    for name in setup["needed"]:
        try:
            importlib.import_module(name)
        except BaseException as error:
            return f"importing {name} failed with {type(error).__name__}: {error}"
    for name in setup["wanted"]:
        module, _, attribute = name.partition(":")
        with contextlib.suppress(Exception):
            getattr(importlib.import_module(module), attribute or "__name__")
    return _unfit()


def _skip_native_destructors() -> None:
    """Let ranks end without the destructors of the C++ libraries that were imported.

    torch's take 0.1 s of processor time. Libraries that a program loads later are destroyed as
    usual; a library that was preloaded (a profiler) may count on its own destructors. Python's own
    steps at its end are left as they are: leaving out torch's exit handlers as well aborted
    programs more often (see `child._let_native_threads_finish`).
    """
    if not os.environ.get("LD_PRELOAD"):
        with contextlib.suppress(AttributeError):  # a C library other than GNU's
            libc = ctypes.CDLL(None)
            libc.on_exit(libc._exit, None)  # handlers run in reverse order
            libc.__cxa_atexit(libc.fflush, None, None)


def _unfit() -> str | None:
    """Return why a fork of this process would not be as a fresh interpreter."""
    if _has_children():
        return "an imported module has started a process"
    threads = _threads_after_fork()
    if threads > 1:
        return f"an imported module has started threads ({threads - 1} of them)"
    device = device_in_use()
    return None if device is None else f"{device} is in use already"


def device_in_use() -> str | None:
    """Return the accelerator that this process uses through torch: its driver outlives no fork.

    Torch is not imported for it.
    """
    torch: Any = sys.modules.get("torch")
    current = getattr(getattr(torch, "accelerator", None), "current_accelerator", None)
    device = None if current is None else current()  # it initializes nothing
    for kind in () if torch is None else dict.fromkeys(("cuda", device and device.type)):
        module = getattr(torch, kind or "", None)
        is_initialized = getattr(module, "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return "CUDA" if kind == "cuda" else f"the device {kind!r}"
    return None


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _threads_after_fork() -> int:
    """Fork once for trial, and count the threads that stay."""
    trial = os.fork()
    if trial == 0:
        os._exit(0)
    os.waitpid(trial, 0)
    deadline = time.monotonic() + _THREAD_END_S
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    return len(os.listdir("/proc/self/task"))


# --- the fork ----------------------------------------------------------------------------------


def _serve(link: socket.socket) -> tuple[_Message, list[int]]:
    """Fork a rank for each order; return in the ranks alone, with the order."""
    while True:
        order, fds = receive(link)
        try:
            if _fork(link, order):
                return order, fds
        except OSError as error:
            send(link, {"error": error.strerror, "errno": error.errno})
        for fd in fds:
            os.close(fd)


def _fork(link: socket.socket, order: _Message) -> bool:
    """Fork a rank that will be the launcher's child; send its number; return True in the rank."""
    intermediate = os.fork()
    if intermediate != 0:
        os.waitpid(intermediate, 0)
        return False
    order["intermediate"] = os.getpid()
    pid = -1
    try:
        pid = os.fork()
        if pid != 0:
            send(link, {"pid": pid})
    except OSError as error:
        send(link, {"error": error.strerror, "errno": error.errno})
    finally:
        if pid != 0:
            os._exit(0)
    return True


# --- in the rank -------------------------------------------------------------------------------


def settle(order: _Message, fds: list[int], before: dict[str, str]) -> int:
    """Make this copy of a process what a fresh interpreter would be; return the pipe for reports.

    Args:
        order: `numbers` and `environment` of the launcher's order.
        fds: The descriptors that get those numbers, and the pipe.
        before: The variables that the process was started with.
    """
    os.setsid()
    report = _take_descriptors(order["numbers"], fds)
    _set_environment(order["environment"], before)
    if 0 in order["numbers"]:
        sys.stdin = sys.__stdin__ = _open_stdin()
    importlib.invalidate_caches()
    _reseed()
    gc.enable()
    return report


def _set_environment(wanted: dict[str, str], before: dict[str, str]) -> None:
    """Give the rank its variables; keep what an import has set, for it would set it here, too."""
    for name in before.keys() - wanted.keys():
        os.environ.pop(name, None)
    os.environ.update({name: x for name, x in wanted.items() if before.get(name) != x})


def _remember_environment() -> None:
    """Keep the environment that torch has read, so that `dure.env` finds later changes."""
    module = ModuleType("__dure_forked__")
    module.__dict__.update(environment=dict(os.environ), pid=os.getpid())
    sys.modules["__dure_forked__"] = module


def _take_descriptors(numbers: list[int], fds: list[int]) -> int:
    """Move each descriptor to its number, and the last one, which has none, out of the way."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=False):
        os.dup2(fd, number)
        os.close(fd)
    return moved[-1]


def _open_stdin() -> TextIO:
    """Open descriptor 0 as the interpreter does when it starts."""
    old = sys.stdin
    text = open(  # noqa: SIM115
        0, encoding=old.encoding, errors=old.errors, newline="\n", closefd=False
    )
    through: bool = getattr(old, "write_through", False)
    text.reconfigure(write_through=through, line_buffering=text.isatty() and not through)
    text.buffer.raw.name = "<stdin>"  # pyright: ignore[reportAttributeAccessIssue]
    text.mode = "r"  # pyright: ignore[reportAttributeAccessIssue]
    return text


def _reseed() -> None:
    """Draw again what every process draws when it starts (`random` does so by itself)."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:  # torch.seed() would ask for CUDA as well
        generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
    renumber = getattr(threading.main_thread(), "_set_native_id", None)
    if renumber is not None:
        renumber()


if __name__ == "__main__":
    main()
