"""The engine called where it is easily forgotten: in signal handlers, and in forked children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import dure
from dure.comm.ops import ReduceOp
from dure.errors import Aborted, UsageError
from tests.comm.forked_ranks import Ranks, Slot, in_child, join, while_waiting
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("engine")


class _Stop(Exception):
    """What a program's handler raises."""


def _while_waiting(handler) -> None:
    """Let a signal come, and so its `handler`, when this thread waits."""
    signal.signal(signal.SIGALRM, lambda *_: handler())
    while_waiting(lambda: os.kill(os.getpid(), signal.SIGALRM))


def _closes_in_handler(slot: Slot, operation: str, raises: bool) -> str:
    backend = join(slot)
    if slot.rank == 1:
        return _wait_for_others(backend)

    def handler() -> None:
        backend.close(abort=True)
        if raises:
            raise _Stop

    pending = backend.barrier(async_op=True) if operation == "queued" else None
    try:
        _while_waiting(handler)
        if operation == "recv":
            backend.recv(torch.zeros(4), 1, 0, async_op=False)
        else:
            backend.barrier(async_op=False)
    except (Aborted, _Stop) as error:
        return type(error).__name__
    finally:
        del pending
        backend.close(abort=True)
    return "done"


def _wait_for_others(backend) -> str:
    """Wait, without taking part, until the other rank has left."""
    with pytest.raises(Exception) as told:
        backend.recv(torch.zeros(1), 0, 99, async_op=False)
    return type(told.value).__name__


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("operation", ["barrier", "queued", "recv"])
def test_handler_that_closes_the_group_ends_the_wait_of_2_ranks(tmp_path, operation, raises):
    with Ranks(2, tmp_path, _closes_in_handler, operation, raises) as ranks:
        assert ranks.result(0) == ("_Stop" if raises else "Aborted")
        assert ranks.result(1) == "PeerLost"


def _calls_in_handler(slot: Slot) -> tuple[list[str], float]:
    backend = join(slot)
    told: list[str] = []

    def handler() -> None:
        try:
            backend.barrier(async_op=False)
        except UsageError as error:
            told.append(type(error).__name__)
        backend.send(torch.ones(1), 1, 0, async_op=False)

    x = torch.ones(1)
    if slot.rank == 0:
        _while_waiting(handler)
    else:
        backend.recv(torch.zeros(1), 0, 0, async_op=False)  # arrive when the handler has run
    backend.all_reduce(x, ReduceOp.SUM, async_op=False)
    backend.close(abort=False)
    return told, x.item()


def test_collective_in_a_handler_is_refused_and_the_waiting_one_succeeds_on_2_ranks(tmp_path):
    with Ranks(2, tmp_path, _calls_in_handler) as ranks:
        assert ranks.values() == [(["UsageError"], 2.0), ([], 2.0)]


def _outcome(ask: Callable[[], object]) -> str:
    try:
        return str(ask())
    except Exception as error:
        return type(error).__name__


def _forks_while_pending(slot: Slot, backend: str) -> tuple[object, float]:
    slot.init(backend)
    x, y, z = (torch.full((1 << 18,), 1.0) for _ in range(3))
    before = dure.all_reduce(z, async_op=True)
    assert before is not None
    before.wait()
    group = dure.group.WORLD
    seen: object = None
    if slot.rank == 0:  # the other rank begins when this one has forked
        reduced, received = dure.all_reduce(x, async_op=True), dure.irecv(y, 1)
        reduced_too, reduced_last = (dure.all_reduce(t, async_op=True) for t in (x, x))
        assert reduced and received and reduced_too and reduced_last
        seen = in_child(
            lambda: [
                _outcome(before.wait),
                _outcome(reduced.wait),
                _outcome(lambda: received.wait(60.0)),
                _outcome(reduced_too.is_completed),
                _outcome(reduced_too.wait),
                _outcome(lambda: reduced_last.get_future().wait()),
                *map(_outcome, (group.barrier, lambda: group.all_reduce(z))),
                _outcome(lambda: dure.monitored_barrier(group, timeout=5.0)),
                _outcome(lambda: group.channel(1)),
                _outcome(group.abort),
            ]
        )
        dure.send(torch.ones(1), 1)
        for work in (received, reduced, reduced_too, reduced_last):
            work.wait()
    else:
        dure.recv(torch.zeros(1), 0)
        dure.send(torch.full_like(y, 5.0), 0)
        for _ in range(3):
            dure.all_reduce(x)
    dure.destroy_process_group()
    return seen, x.sum().item() + y.sum().item()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_pending_operations_are_refused_in_a_forked_child(tmp_path, backend):
    """The parent's operations go on, with the right numbers."""
    child = ["True", "UsageError", "UsageError", "True", "UsageError"]
    numbers = (1 << 18) * 8.0
    with Ranks(2, tmp_path, _forks_while_pending, backend) as ranks:
        (seen, first), (_, second) = ranks.values()
    assert seen[:5] == child
    assert seen[5] in ("RuntimeError", "UsageError")
    assert seen[6:] == ["UsageError", "UsageError", "UsageError", "UsageError", "None"]
    assert (first, second) == (numbers + (1 << 18) * 5.0, numbers + (1 << 18) * 1.0)


# Something slow in the modules' globals keeps the interpreter's end going on for a while.
_ENDS_WHILE_WAITING = """
import os, sys, threading, time
from dure.native import Group, Subject

group = Group.create(0, 2, 30.0, 2, 1)
peer = Group.attach(1, 2, 30.0, 2, os.getpid(), group.file, 1)
group.ready()
peer.ready()
barrier = (1, 0, 8, -1, [], [], 0, 1.0, Subject(0, ""))
channel = group.channel(0)
waiting = threading.Event()

def wait():
    pending = channel.run(*barrier, True, ()) if sys.argv[1] == "async" else None
    waiting.set()
    pending.wait() if pending else channel.run(*barrier, False, ())

class Slow:
    def __del__(self, sleep=time.sleep):
        for _ in range(40):
            sleep(0.01)

sys.modules["slow"] = Slow()
threading.Thread(target=wait, daemon=True).start()
waiting.wait()
"""


@pytest.mark.parametrize("call", ["async", "sync"])
def test_program_that_ends_while_a_daemon_thread_waits_ends_well(call):
    command = [sys.executable, "-c", _ENDS_WHILE_WAITING, call]
    ended = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def _error_of_a_barrier() -> str:
    with pytest.raises(UsageError) as caught:
        dure.barrier()
    return str(caught.value)


def _forks_before_and_after_leaving(slot: Slot) -> tuple[str, str]:
    slot.init()
    before = in_child(_error_of_a_barrier)
    dure.destroy_process_group()
    return before, in_child(_error_of_a_barrier)


def test_a_forked_child_learns_that_the_default_group_is_its_parents(tmp_path):
    with Ranks(1, tmp_path, _forks_before_and_after_leaving) as ranks:
        ((before, after),) = ranks.values()
    assert "forked from" in before
    assert "has not been initialized" in after
