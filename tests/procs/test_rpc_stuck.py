"""Programs in which threads, or processes, could wait for each other for good."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dure import native, rpc
from dure.errors import RpcError
from dure.rpc.current import current
from procs.launching import Launching, launching
from procs.rpc_workers import Start, double, nap, workers
from waiting import until

pytestmark = pytest.mark.skipif(not native.available()[0], reason="needs the native engine")

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launching]:
    yield from launching(tmp_path)


def test_threads_compute_with_a_leaf_while_others_go_back_to_it() -> None:
    """torch would keep Python's lock for ever, so that no limit within the process helps."""
    program = [sys.executable, str(PROGRAMS / "rpc_leaves.py")]
    ended = subprocess.run(program, timeout=60, capture_output=True, text=True, check=True)
    assert ended.stdout == "ended\n"


def test_two_train_by_ddp_and_serve_each_other(launcher: Launching) -> None:
    job = launcher.run("--nproc", "2", str(PROGRAMS / "rpc_ddp_both_ways.py"))
    assert job.code == 0, job.err
    assert [job.lines(rank) for rank in (0, 1)] == [["ended"], ["ended"]]


@pytest.mark.parametrize(
    "wait",
    [
        lambda: rpc.rpc_sync("other", nap, (30.0,)),
        lambda: rpc.rpc_async("other", nap, (30.0,)).wait(),
        lambda: rpc.remote("other", nap, (30.0,)).to_here(),
    ],
    ids=["rpc_sync", "future", "to_here"],
)
def test_ctrl_c_ends_a_wait(wait: Callable[[], object], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    with workers(Start(name="other", rank=1, world_size=2, url=url)) as others:
        Start(name="program", rank=0, world_size=2, url=url).init()
        try:
            assert others[0].said() == 1

            def interrupt() -> None:
                until(lambda: current().activity()[1] > 0, "a call")
                os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=interrupt)
            thread.start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                wait()
            thread.join()
            assert time.monotonic() - began < 15.0
            assert rpc.rpc_sync("other", double, (21,)) == 42
        finally:
            rpc.shutdown(graceful=False)


def test_a_forked_child_is_no_worker(tmp_path: Path) -> None:
    Start(name="program", rank=0, world_size=1, url=f"file://{tmp_path}/meeting").init()
    try:
        rref = rpc.RRef(1)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            outcomes: list[bool] = []
            for call in (lambda: rpc.rpc_sync("program", double, (1,)), rref.to_here):
                try:
                    call()
                except RpcError:
                    outcomes.append(True)
            os._exit(0 if outcomes == [True, True] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert rpc.rpc_sync("program", double, (21,)) == 42
        assert rref.to_here() == 1
    finally:
        rpc.shutdown(graceful=False)


def test_the_end_at_once_does_not_wait_for_calls_that_run(tmp_path: Path) -> None:
    Start(name="program", rank=0, world_size=1, url=f"file://{tmp_path}/meeting").init()
    future = rpc.rpc_async("program", nap, (20.0,))
    until(lambda: current().activity()[1] == 2, "the call to run")
    began = time.monotonic()
    rpc.shutdown(graceful=False)
    assert time.monotonic() - began < 10.0
    with pytest.raises(RpcError, match="shut down"):
        future.wait()
