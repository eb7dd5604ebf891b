"""Elastic training on thread-ranks: who leaves, who comes, and what the model is afterwards."""

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import dure
from dure.comm.world import new_world
from dure.elastic import Options, State, running
from dure.errors import Desync, StoreLost
from dure.store import HashStore
from dure.testing import run_ranks
from tests.elastic.procs.programs.elastic_job import STEPS, make_state, train
from tests.waiting import PATIENCE_S

TIMEOUT = timedelta(seconds=PATIENCE_S)


class Leaves(Exception):
    """What a rank raises that is to be lost."""


def leaves(now: bool) -> None:
    if now:
        raise Leaves


class Job:
    """Ranks that share a store, and what became of each."""

    def __init__(self, n: int, **options: Any) -> None:
        self.n, self.store = n, HashStore(TIMEOUT)
        self.options: dict[str, Any] = {"timeout": TIMEOUT, "enough_s": PATIENCE_S} | options
        self.states: dict[int, State] = {}
        self.errors: dict[int, BaseException] = {}
        self.late: dict[int, threading.Event] = {}  # ranks that start when this is set

    def run(self, body: Callable[[int, State], Any], extra: int = 0) -> list[Any]:
        """Run `body(rank, state)` on all ranks; return what each one's `run` returned."""

        def rank(r: int) -> Any:
            if r in self.late:
                self.late[r].wait()
            with new_world():
                state = self.states[r] = make_state()
                options = Options(
                    store=self.store, rank=r, world_size=self.n, backend="threads", **self.options
                )
                try:
                    return dure.elastic.run(lambda s: body(r, s), state, options)
                except Exception as error:
                    self.errors[r] = error
                    return None

        return run_ranks(self.n + extra, rank)


class LostStore(HashStore):
    """A store that answers until it is `lost`. Groups are made undisturbed."""

    lost = False

    def _fail(self, key: str) -> None:
        if self.lost and "/group/" not in key:
            raise StoreLost("the connection broke")

    def set(self, key: str, value: str | bytes) -> None:
        self._fail(key)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self._fail(key)
        return super().get(key)


@functools.cache
def undisturbed() -> list[float]:
    return Job(1).run(lambda rank, state: train(state))[0]


@pytest.mark.parametrize("victims", [{2}, {0}, {1, 3}, {0, 1, 2}])
def test_the_others_go_on_and_the_result_is_as_if_nobody_had_left(victims: set[int]):
    job = Job(4)
    results = job.run(
        lambda rank, state: train(state, lambda step: leaves(step == 2 and rank in victims))
    )
    assert {r for r, e in job.errors.items() if isinstance(e, Leaves)} == victims
    assert set(job.errors) == victims
    for rank in set(range(4)) - victims:
        assert results[rank] == pytest.approx(undisturbed(), rel=1e-9, abs=1e-12)
        assert (job.states[rank].seen == 1).all()
        assert job.states[rank].commits == STEPS
        assert sum(r.lost for r in job.states[rank].recoveries) == len(victims)


def test_an_error_that_a_lost_peer_explains_is_no_error():
    job = Job(3)

    def body(rank: int, state: State) -> list[float]:
        try:
            return train(state, lambda step: leaves(step == 1 and rank == 1))
        except dure.PeerLost as lost:
            raise KeyError("clean-up failed, too") from lost

    results = job.run(body)
    assert set(job.errors) == {1}
    assert results[0] == results[2] == pytest.approx(undisturbed(), rel=1e-9, abs=1e-12)


def test_a_group_that_fails_again_and_again_without_a_loss_raises_the_error():
    job = Job(2)
    tries = [0, 0]

    def body(rank: int, state: State) -> None:
        tries[rank] += 1
        dure.barrier()
        raise dure.PeerLost("says the program")

    job.run(body)
    assert [type(job.errors[r]) for r in range(2)] == [dure.PeerLost] * 2
    assert tries == [4, 4]


def test_a_loss_that_one_rank_alone_has_seen_does_not_let_the_others_wait_for_it():
    job = Job(3)
    hurt: list[int] = []

    def body(rank: int, state: State) -> int:
        if rank == 1 and not hurt:
            hurt.append(rank)
            raise dure.PeerLost("of a message, or of a group that others are not in")
        dure.barrier()
        state.commit()
        return len(state.recoveries)

    assert job.run(body) == [1, 1, 1]
    assert not job.errors


def test_a_store_that_is_lost_ends_nothing_before_it_is_needed_and_then_says_so(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(running, "_LOOK_S", 0.0)  # for newcomers, after each step
    job = Job(2)
    job.store = failing = LostStore(TIMEOUT)

    def body(rank: int, state: State) -> None:
        def at_step(step: int) -> None:
            if step == 1:
                failing.lost = True
            if step == 3:
                raise dure.PeerLost("of a message")

        train(state, at_step)

    job.run(body)
    assert [type(job.errors[r]) for r in range(2)] == [StoreLost, StoreLost]
    assert [job.states[r].commits for r in range(2)] == [3, 3]
    for word in ("checkpoint", "dure run", "etcd"):
        assert word in str(job.errors[0])


def test_newcomers_are_let_in_at_a_step_boundary_with_the_state():
    job = Job(2)
    job.late[2] = threading.Event()
    sizes: dict[int, list[int]] = {r: [] for r in range(3)}

    def body(rank: int, state: State) -> int:
        sizes[rank].append(dure.get_world_size())
        while dure.get_world_size() < 3 or state.epoch < 5:
            state.epoch += dure.get_world_size() == 3
            state.seen += 1
            state.commit()
            job.late[2].set()
        total = state.seen.clone()
        dure.all_reduce(total)
        assert torch.equal(total, 3 * state.seen)
        return state.commits

    results = job.run(body, extra=1)
    assert results[0] == results[1] == results[2]
    assert sizes == {0: [2, 3], 1: [2, 3], 2: [3]}
    assert [s.seen.unique().numel() for s in job.states.values()] == [1, 1, 1]


def test_the_next_run_does_not_wait_for_a_rank_that_was_lost_in_the_last_one():
    job = Job(3)
    sizes: dict[int, list[int]] = {}

    def body(rank: int, state: State) -> int:
        state.commit()
        leaves(rank == 2)
        state.commit()
        return dure.get_world_size()

    def rank(r: int) -> None:
        with new_world():
            options = Options(
                store=job.store,
                rank=r,
                world_size=3,
                backend="threads",
                enough_s=100 * PATIENCE_S,  # what must not be waited for
            )
            runs = [dure.elastic.run(lambda s: body(r, s), State(n=0), options) for _ in range(2)]
            sizes[r] = [size for size in runs if size is not None]

    with pytest.raises(Leaves):
        run_ranks(3, rank)
    assert sizes == {0: [2, 2], 1: [2, 2]}


def test_ranks_that_do_not_commit_the_same_step_are_told_so():
    job = Job(2)

    def body(rank: int, state: State) -> None:
        for _ in range(2 + rank):
            state.commit()

    job.run(body)
    assert [type(job.errors[r]) for r in range(2)] == [Desync, Desync]
