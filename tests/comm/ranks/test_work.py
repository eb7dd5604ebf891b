"""`Work`: waiting, asking, futures, errors, and what destroy does to what is pending."""

import threading
import warnings
from datetime import timedelta

import pytest
import torch

import dure as dist
from dure.comm import work as work_module
from dure.comm.work import Work, combine
from dure.errors import CommTimeout, UsageError
from dure.testing import run_ranks
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S

BACKENDS = ["threads", pytest.param("shm", marks=pytest.mark.needs("engine"))]


def test_results_that_cannot_be_copied_back_are_a_failure_at_every_wait():
    class Done:
        source = -1

        def done(self):
            return True

        def wait(self, timeout_s=None):
            return True

    def copy_back():
        raise RuntimeError("no memory")

    work = Work(Done(), [], finish=copy_back)  # pyright: ignore[reportArgumentType]
    future = work.get_future()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            work.wait()
    with pytest.raises(RuntimeError, match="no memory"):
        future.wait()
    assert not work.is_success()


@pytest.mark.parametrize("limit", ["5", float("nan"), [1]])
@on_ranks(2)
def test_limits_that_are_no_times_are_refused_before_anything_is_sent(rank, limit):
    work = dist.barrier(async_op=True)
    before = dist.group.WORLD.seq
    for call in (
        work.wait,
        lambda limit: dist.barrier(timeout=limit),
        lambda limit: dist.monitored_barrier(timeout=limit),
        lambda limit: dist.new_group(timeout=limit),
        dist.group.WORLD.set_timeout,
    ):
        with pytest.raises(UsageError):
            call(limit)
    assert dist.group.WORLD.seq == before
    assert work.wait()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [float("inf"), 1e300, timedelta.max])
def test_limits_may_be_longer_than_clocks_count(backend, limit):
    def body(rank):
        dist.barrier(timeout=limit)
        dist.monitored_barrier(timeout=limit)
        group = dist.new_group(timeout=limit)
        assert dist.barrier(group, async_op=True).wait(limit)

    run_ranks(2, body, backend=backend)


def test_wait_with_a_limit_raises_and_can_be_repeated():
    go = threading.Event()

    def body(rank):
        t = torch.ones(1)
        if rank == 1:
            go.wait(PATIENCE_S)
        work = dist.all_reduce(t, async_op=True)
        if rank == 0:
            with pytest.raises(CommTimeout) as caught:
                work.wait(timedelta(milliseconds=20))
            assert caught.value.op == "all_reduce"
            assert not work.is_completed()
            assert work.exception() is None
            go.set()
        work.wait(timedelta(0))  # no limit of its own
        return t.item()

    assert run_ranks(2, body) == [2.0, 2.0]


_FINISHED_BY_A_COPY = {
    "sparse": lambda rank: dist.all_reduce(torch.ones(2).to_sparse(), async_op=True),
    "all_reduce": lambda rank: dist.all_reduce(torch.ones(2, 3).t(), async_op=True),
    "message": lambda rank: (
        dist.isend(torch.ones(2), 1) if rank == 0 else dist.irecv(torch.empty(4)[::2], 0)
    ),
}


@pytest.mark.parametrize("op", _FINISHED_BY_A_COPY)
@on_ranks(2)
def test_second_waiter_does_not_return_before_the_result_is_copied_back(rank, op):
    """The second thread waits, or asks, while the first is copying."""

    work, copied, seen = _FINISHED_BY_A_COPY[op](rank), [], []
    finish = work._finish
    if finish is None:
        assert (op, rank) == ("message", 0)
        work.wait()
        return

    def slowly():
        other.start()
        other.join(0.05)  # it can only be too early: it waits for this thread
        finish()
        copied.append(True)

    def ask():
        seen.append(work.is_completed() and not copied)
        work.wait()
        seen.append(not copied)

    other = threading.Thread(target=ask)
    work._finish = slowly
    work.wait()
    assert copied
    other.join()
    assert seen == [False, False]


@on_ranks(2)
def test_future_chains_and_carries_errors(rank):
    work = dist.all_reduce(torch.tensor([2.0]), async_op=True)
    doubled = work.get_future().then(lambda f: [t * 2 for t in f.wait()])
    assert work.get_future() is work.get_future()
    assert doubled.wait()[0].item() == 8.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_work_that_is_dropped_unwaited_is_told_once_with_its_line(backend, monkeypatch):
    monkeypatch.setattr(work_module, "_warned", set())

    def body(rank):
        for _ in range(3):
            dist.all_reduce(torch.ones(1), async_op=True)
        dist.barrier()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, body, backend=backend)
    (told,) = [w for w in caught if issubclass(w.category, RuntimeWarning)]
    assert told.filename == __file__
    assert told.lineno == body.__code__.co_firstlineno + 2


@pytest.mark.parametrize(
    "ask",
    [
        lambda work: work.wait(),
        lambda work: work.is_completed(),
        lambda work: work.get_future(),
        lambda work: combine([work], [], True).wait(),  # pyright: ignore
    ],
)
def test_work_that_somebody_asks_for_is_no_mistake(ask):
    def body(rank):
        ask(dist.all_reduce(torch.ones(1), async_op=True))
        dist.barrier()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, body)
    assert [str(w.message) for w in caught] == []
