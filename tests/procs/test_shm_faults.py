"""The shm backend when ranks die, stop, leave, or call different things."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch

from dure.comm.ops import ReduceOp
from dure.errors import Aborted, CommError, CommTimeout, Desync, PeerLost
from dure.native import available
from procs.shm_ranks import Ranks, Slot, join

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1] or "-")

SUM = ReduceOp.SUM
FATES = {
    "killed": "signal 9 (SIGKILL)",
    "exits": "exit code 3",
    "crashes": "signal 11 (SIGSEGV)",
}
SOON_S = 15.0  # the engine promises milliseconds; a busy machine gets more


def _caught(call) -> tuple[CommError, float]:
    """Return the error of `call`, and the seconds it took."""
    began = time.monotonic()
    try:
        call()
    except CommError as error:
        return error, time.monotonic() - began
    raise AssertionError("the call succeeded")


# ---- death ---------------------------------------------------------------------------------------


def _dies(slot: Slot, count: int, how: str):
    backend = join(slot)
    x = torch.ones(count)
    for _ in range(3):
        backend.all_reduce(x, SUM, False)
    if slot.rank == 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        match how:
            case "exits":
                os._exit(3)
            case "crashes":
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGSEGV)
            case _:
                os.kill(os.getpid(), signal.SIGKILL)
    first, took = _caught(lambda: backend.all_reduce(x, SUM, False))
    again, again_took = _caught(lambda: backend.barrier(False))
    message, message_took = _caught(lambda: backend.recv(x, 0, 0, False))
    backend.close(False)
    return [first, again, message], max(took, again_took, message_took)


@pytest.mark.parametrize("count", [1, 1 << 20])
@pytest.mark.parametrize("how", ["killed", "exits", "crashes"])
def test_dead_rank_is_lost_on_all_of_3_ranks(tmp_path, how, count):
    with Ranks(3, tmp_path, _dies, count, how) as ranks:
        pid = ranks.processes[1].pid
        for rank in (0, 2):
            errors, took = ranks.result(rank)
            assert took < SOON_S
            for error in errors:
                assert isinstance(error, PeerLost)
                assert (error.peer, error.pid, error.rank) == (1, pid, rank)
                # How it ended is known where the kernel says it to others (Linux 6.15).
                assert error.exit in (None, FATES[how])


def _forks_and_dies(slot: Slot):
    backend = join(slot)
    x = torch.ones(4)
    if slot.rank == 1:
        if os.fork() == 0:
            os._exit(0)  # takes nothing of its parent's with it
        os.wait()
        backend.all_reduce(x, SUM, False)
        read, write = os.pipe()
        if os.fork() == 0:
            os.close(write)
            os.read(read, 1)  # outlives its parent, by a little
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    backend.all_reduce(x, SUM, False)
    lost, took = _caught(lambda: backend.all_reduce(x, SUM, False))
    backend.close(False)
    return lost, took


def test_forked_child_neither_is_nor_keeps_its_rank_of_3(tmp_path):
    with Ranks(3, tmp_path, _forks_and_dies) as ranks:
        pid = ranks.processes[1].pid
        for rank in (0, 2):
            error, took = ranks.result(rank)
            assert isinstance(error, PeerLost)
            assert (error.peer, error.pid) == (1, pid)
            assert took < SOON_S


def _dies_while_awaited(slot: Slot):
    backend = join(slot)
    x = torch.zeros(4)
    if slot.rank == 1:
        backend.send(x, 0, 0, False)
        os._exit(0)
    backend.recv(x, 1, 0, False)  # was sent before the death
    posted = backend.recv(x, 1, 1, True)
    return [_caught(call)[0] for call in (posted.wait, lambda: backend.recv(x, None, 2, False))]


def test_receive_from_a_dead_rank_is_lost_on_2_ranks(tmp_path):
    with Ranks(2, tmp_path, _dies_while_awaited) as ranks:
        errors = ranks.result(0)
        assert [type(e) for e in errors] == [PeerLost, PeerLost]
        assert {e.peer for e in errors} == {1}


# ---- silence -------------------------------------------------------------------------------------


def _stops(slot: Slot, operation: str):
    backend = join(slot)
    x = torch.ones(200_000)
    backend.all_reduce(x, SUM, False)
    backend.set_timeout(timedelta(seconds=1))  # all had the time to come
    if slot.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if operation == "async":
        request = backend.all_reduce(x, SUM, True)
        assert request is not None
        return _caught(request.wait)[0]
    arguments = (False,) if operation == "barrier" else (x, 1, False)
    return _caught(lambda: getattr(backend, operation)(*arguments))[0]


@pytest.mark.parametrize("operation", ["barrier", "broadcast", "async"])
def test_stopped_rank_is_missing_at_the_timeout_of_3_ranks(tmp_path, operation):
    with Ranks(3, tmp_path, _stops, operation) as ranks:
        for rank in (0, 2):
            error = ranks.result(rank)
            assert isinstance(error, CommTimeout)
            assert error.missing == (1,)
            assert "stopped" in error.whereabouts[1]
        os.kill(ranks.processes[1].pid, signal.SIGCONT)
        late = ranks.result(1)  # hears at once that the others gave up
        assert isinstance(late, CommTimeout)


def _is_elsewhere(slot: Slot, calls: int):
    backend = join(slot)
    for _ in range(calls):
        backend.all_reduce(torch.ones(4), SUM, False)
    if slot.rank == 1:
        _caught(lambda: backend.recv(torch.ones(4), 0, 0, False))  # the line that is told
        return None
    backend.set_timeout(timedelta(seconds=1.5))
    error = _caught(lambda: backend.barrier(False))[0]
    backend.close(False)
    return error


@pytest.mark.parametrize("calls", [0, 3])
def test_absent_rank_tells_its_line_at_the_timeout_of_3_ranks(tmp_path, calls):
    with Ranks(3, tmp_path, _is_elsewhere, calls) as ranks:
        code = _is_elsewhere.__code__
        told = [ranks.result(rank) for rank in (0, 2)]
        for error in told:
            assert isinstance(error, CommTimeout)
            assert error.missing == (1,)
            where = error.whereabouts[1]
            assert f"{code.co_filename}:{code.co_firstlineno + 5} in _is_elsewhere" in where
            assert (f"all_reduce #{calls}" in where) == (calls > 0)


def _receives_nothing(slot: Slot):
    backend = join(slot)
    if slot.rank == 0:
        backend.set_timeout(timedelta(seconds=slot.timeout_s / 100))
        error = _caught(lambda: backend.recv(torch.zeros(3), 1, 0, False))[0]
        backend.set_timeout(timedelta(seconds=slot.timeout_s))
        backend.barrier(False)
        return error
    backend.barrier(False)
    return None


def test_message_that_does_not_come_leaves_the_group_of_2_whole(tmp_path):
    with Ranks(2, tmp_path, _receives_nothing) as ranks:
        error = ranks.result(0)
        assert isinstance(error, CommTimeout)
        assert error.missing == (1,)
        assert ranks.result(1) is None


# ---- other calls ---------------------------------------------------------------------------------

PAIRS = {
    "operation": (lambda b, x: b.all_reduce(x, SUM, False), lambda b, x: b.broadcast(x, 0, False)),
    "barrier": (lambda b, x: b.all_reduce(x, SUM, False), lambda b, x: b.barrier(False)),
    "count": (
        lambda b, x: b.all_reduce(x, SUM, False),
        lambda b, x: b.all_reduce(x[1:], SUM, False),
    ),
    "dtype": (
        lambda b, x: b.all_reduce(x, SUM, False),
        lambda b, x: b.all_reduce(x.view(torch.int32), SUM, False),
    ),
    "reduction": (
        lambda b, x: b.all_reduce(x, SUM, False),
        lambda b, x: b.all_reduce(x, ReduceOp.MAX, False),
    ),
    "root": (lambda b, x: b.broadcast(x, 0, False), lambda b, x: b.broadcast(x, 1, False)),
    "length": (
        lambda b, x: b.all_gather([x[:4], x[4:8], x[8:12]], x[:4].clone(), False),
        lambda b, x: b.all_gather([x[:4], x[4:9], x[9:13]], x[:5].clone(), False),
    ),
    "blocks": (
        lambda b, x: b.all_to_all([x[:2], x[2:4], x[4:6]], [x[6:8], x[8:10], x[10:12]], False),
        lambda b, x: b.all_to_all([x[:2], x[2:4], x[4:6]], [x[6:8], x[8:10], x[10:13]], False),
    ),
    "async": (lambda b, x: b.all_reduce(x, SUM, True).wait(), lambda b, x: b.barrier(False)),
}


def _differs(slot: Slot, kind: str, count: int):
    backend = join(slot)
    x = torch.arange(count, dtype=torch.float32) + slot.rank
    before = x.clone()
    error, took = _caught(lambda: PAIRS[kind][slot.rank == 1](backend, x))
    later = _caught(lambda: backend.barrier(False))[0]
    return error, took, later, torch.equal(x, before)


@pytest.mark.parametrize("count", [13, 300_000])
@pytest.mark.parametrize("kind", PAIRS)
def test_different_calls_are_told_to_all_of_3_ranks_before_data_change(tmp_path, kind, count):
    with Ranks(3, tmp_path, _differs, kind, count) as ranks:
        for rank in range(3):
            error, took, later, untouched = ranks.result(rank)
            assert isinstance(error, Desync)
            assert isinstance(later, Desync)
            assert set(error.calls) == {0, 1, 2}
            assert error.calls[0] == error.calls[2] != error.calls[1]
            assert error.seq == 1
            assert error.op == error.calls[rank].partition("(")[0]
            assert took < SOON_S
            assert untouched


# ---- leaving -------------------------------------------------------------------------------------


def _leaves(slot: Slot):
    backend = join(slot)
    if slot.rank == 1:
        return backend.close(False)
    return _caught(lambda: backend.all_reduce(torch.ones(5), SUM, False))[0]


def test_rank_that_left_is_lost_on_3_ranks(tmp_path):
    with Ranks(3, tmp_path, _leaves) as ranks:
        for rank in (0, 2):
            error = ranks.result(rank)
            assert isinstance(error, PeerLost)
            assert error.peer == 1


def _is_aborted(slot: Slot):
    backend = join(slot)
    if slot.rank == 1:
        backend.barrier(False)
        backend.recv(torch.zeros(1), 0, 0, False)
        return _caught(lambda: backend.recv(torch.zeros(1), 0, 5, False))[0]  # until it has gone
    x = torch.ones(3)
    backend.barrier(False)
    pending = [backend.all_reduce(x, SUM, True), backend.recv(x, 1, 0, True)]
    caught = []
    blocked = threading.Thread(
        target=lambda: caught.append(_caught(lambda: backend.recv(x, 1, 1, False))[0])
    )
    blocked.start()
    backend.send(x[:1].clone(), 1, 0, False)
    backend.close(True)
    blocked.join(SOON_S)
    after = _caught(lambda: backend.barrier(False))[0]
    return [*caught, *(_caught(t.wait)[0] for t in pending), after]


def test_closing_aborts_what_is_pending_on_2_ranks(tmp_path):
    with Ranks(2, tmp_path, _is_aborted) as ranks:
        errors = ranks.result(0)
        assert [type(e) for e in errors] == [Aborted] * 4
        assert isinstance(ranks.result(1), PeerLost)


def _is_interrupted(slot: Slot, operation: str):
    backend = join(slot)
    x = torch.ones(3)
    if slot.rank == 0:
        backend.barrier(False)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        try:
            if operation == "recv":
                backend.recv(x, 1, 0, False)
            elif operation == "wait":
                backend.recv(x, 1, 0, True).wait()
            else:
                backend.all_reduce(x, SUM, False)
        except KeyboardInterrupt:
            return time.monotonic() - began
        return None
    backend.barrier(False)
    return _caught(lambda: backend.recv(x, 0, 5, False))[0]  # until rank 0 has gone


@pytest.mark.parametrize("operation", ["all_reduce", "recv", "wait"])
def test_interrupt_ends_a_wait_of_2_ranks(tmp_path, operation):
    with Ranks(2, tmp_path, _is_interrupted, operation) as ranks:
        took = ranks.result(0)
        assert isinstance(took, float)
        assert took < SOON_S
        assert isinstance(ranks.result(1), PeerLost)


# ---- drills --------------------------------------------------------------------------------------


def _works_until_killed(slot: Slot, after_s: float):
    backend = join(slot)
    if slot.rank == 1:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    x, y = torch.ones(100_000), torch.empty(100_000)
    try:
        while True:
            backend.all_reduce(x, SUM, False)
            request = backend.recv(y, (slot.rank - 1) % slot.size, 0, True)
            backend.send(x, (slot.rank + 1) % slot.size, 0, False)
            request.wait()
            x.fill_(1.0)
            backend.barrier(False)
    except CommError as error:
        return error


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(40))
def test_rank_killed_at_a_random_moment_is_lost_on_3_ranks(tmp_path, round_):
    with Ranks(3, tmp_path, _works_until_killed, 0.005 * round_) as ranks:
        for rank in (0, 2):
            error = ranks.result(rank)
            assert isinstance(error, PeerLost)
            assert error.peer == 1
