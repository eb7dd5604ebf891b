"""Fixtures of all tests: pools of processes, and the check that nothing is left behind."""

import os

# One thread for each operation of torch, and of all that tests start: ranks have their own, and two
# threads may add up the same numbers in two orders. Read when torch is loaded, so before all else.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

from dure.launch.ranks.ports import reserve_port
from dure.testing import ProcessPool
from dure.testing.pool import start_server
from tests.launch.faults.agents import Crew
from tests.launch.procs.launching import Launching, launching
from tests.needs import why_missing
from tests.waiting import PATIENCE_S, descriptors

# A job in the background of a shell ignores Ctrl-C, one under nohup ignores SIGHUP, and so would
# all programs that tests start.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        _default = signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, _default)
os.environ["DURE_TRACE_DIR"] = "off"  # what fails on purpose leaves no files; a test sets its own

# Inputs are drawn anew on a developer's machine, where failures are kept in a database and tried
# again first. In CI they are the same in every run. A slow machine is never a failure.
hypothesis.settings.register_profile(
    "dure",
    max_examples=50,
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("dure")

_LIMIT_S = 300.0  # of one test; also in pyproject.toml
_POLL_S = 0.02
_BEFORE_COLLECTING_S = 1.0  # an error that a test has caught holds frames, and they hold it
_REPORTED_S = 1.0  # a module that keeps the next one waiting for longer is named at the end
_SERVERS = ("forkserver", "resource_tracker")  # multiprocessing's own; they live as long as pytest
_WITH_PROCESSES = {"hosts", "procs", "faults", "parity"}  # folders
_HEAP = "/memfd:dure-heap (deleted)"  # a process has one symmetric heap, for as long as it lives
_UNTRACKED = (_HEAP, "anon_inode:[eventpoll]", "anon_inode:[eventfd]", "/dev/null", "/dev/urandom")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs what this machine does not have (`needs.py`)."""
    for mark in item.iter_markers("needs"):
        for need in mark.args:
            if why := why_missing(need):
                pytest.skip(f"needs {need}: {why}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a test that hangs while it waits for processes fail alone.

    A signal interrupts such a wait, and the next test runs. Ranks that are threads may wait in the
    engine, where no signal is seen: then pytest ends.
    """
    for item in items:
        if not _WITH_PROCESSES.isdisjoint(item.path.parts):
            limit = item.get_closest_marker("timeout")
            seconds = limit.args[0] if limit and limit.args else _LIMIT_S
            item.add_marker(pytest.mark.timeout(seconds, method="signal"), append=False)


def pytest_collection_finish() -> None:
    """Take what is loaded by now out of every later garbage collection."""
    _freeze()


def _freeze() -> None:
    """Exempt all objects from garbage collection: they stay, and a collection takes 3 s otherwise.

    Done after each module, since modules load parts of torch that stay loaded.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launching]:
    """Jobs of `dure run`, of which nothing may be left."""
    yield from launching(tmp_path)


@pytest.fixture
def crew(job: Launching, tmp_path: Path) -> Iterator[Crew]:
    """Hosts that are launchers of their own, with a port for their endpoint."""
    keeper, port = reserve_port()
    with keeper:
        hosts = Crew(job, tmp_path, port)
        yield hosts
        hosts.close()


@pytest.fixture
def port() -> Iterator[int]:
    """Yield a port that no other process is given until the test has ended.

    It is bound, not listened at, so a server of the test can bind it too (`reserve_port`).
    """
    keeper, number = reserve_port()
    with keeper:
        yield number


@pytest.fixture(scope="module")
def process_pool() -> Iterator[Callable[..., ProcessPool]]:
    """Return a function `(n, backend)` that makes a pool, one for each pair in a module."""
    pools: dict[tuple[int, str | None], ProcessPool] = {}

    def pool(n: int, backend: str | None = None) -> ProcessPool:
        for key in [k for k, p in pools.items() if k != (n, backend) or p.broken]:
            pools.pop(key).close()
        if (n, backend) not in pools:
            pools[n, backend] = ProcessPool(n, backend)
        return pools[n, backend]

    yield pool
    for p in pools.values():
        p.close()


def _threads() -> set[str]:
    """Threads of tests; the monitor that tqdm starts, within torch.compile, lives on by design."""
    others = ("pytest_timeout", "tqdm_monitor")
    return {t.name for t in threading.enumerate() if not t.name.startswith(others)}


def _children() -> set[str]:
    found = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):
            for pid in Path(f"/proc/self/task/{task}/children").read_text().split():
                found.add(f"{pid} {_command(pid)}")
    return {child for child in found if not child.endswith(" ")}  # those that have ended


def _command(pid: str) -> str:
    """Return a process's command; nothing for one that has ended, or is multiprocessing's own."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").replace("\0", " ")
        if not any(server in words for server in _SERVERS):
            return words
    return ""


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    mine = {p for p in folder.iterdir() if p.name.startswith(("dure", "torch_"))}
    return {str(p) for p in mine if p.exists() and p.stat().st_uid == os.getuid()}


def _descriptors() -> set[str]:
    return {
        found
        for found in descriptors()
        if (target := found.partition(" ")[2]) not in _UNTRACKED
        and not target.startswith(("/proc/", "/dev/nvidia"))
    }


_KINDS: dict[str, Callable[[], set[str]]] = {
    "threads": _threads,
    "child processes": _children,
    "shared memory": _shared_memory,
    "descriptors": _descriptors,
}


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the module's last test if it left threads, processes, descriptors or shared memory.

    What is on its way out gets a moment; a name that was there before the module is not ours.
    """
    if not _WITH_PROCESSES.isdisjoint(request.path.parts):
        start_server()  # its pipes stay open: they are not the module's
    before = {kind: look() for kind, look in _KINDS.items()}
    yield
    begin = time.monotonic()
    left = {"?": {"not looked yet"}}
    slow: dict[str, set[str]] = {}
    while any(left.values()) and time.monotonic() < begin + PATIENCE_S:
        left = {kind: look() - before[kind] for kind, look in _KINDS.items()}
        if any(left.values()):
            slow = left
            time.sleep(_POLL_S)
            if time.monotonic() > begin + _BEFORE_COLLECTING_S:
                gc.collect()
    if (took := time.monotonic() - begin) > _REPORTED_S:
        names = sorted(name for found in slow.values() for name in found)
        _LEFT_LATE.append(f"{request.path.name}: {took:.0f} s for {', '.join(names)}")
    _freeze()
    assert not any(left.values()), {kind: names for kind, names in left.items() if names}


_LEFT_LATE: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the modules whose threads, processes or files took long to end."""
    for line in _LEFT_LATE:
        terminalreporter.write_line(f"LEFT LATE {line}")
