"""A job that was killed in part and started again at once, at the same port: two jobs never mix.

Two ranks on each of two hosts, started by hand. Each job reduces its own number.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import dure as dist
from dure.errors import DureError, RendezvousError, RendezvousTimeout
from dure.store import rendezvous
from tests.comm.forked_ranks import Ranks, Slot
from tests.comm.namespace_hosts import PORT, Host, hosts, variables_of
from tests.hosts.networks import forked_ranks, set_variables
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.needs("network namespaces", "engine")

EACH, COUNT = 2, 4


def reduce(
    slot: Slot,
    variables: dict[str, str],
    number: int,
    times: int | None,
    timeout_s: float = PATIENCE_S / 4,
) -> object:
    """Reduce so often, or until that fails; return the error if there was one.

    Every sum is one of this job's ranks alone.
    """
    set_variables(slot.rank, variables)
    try:
        dist.init_process_group(timeout=timedelta(seconds=timeout_s))
        while times is None or times > 0:
            value = torch.full((1000,), float(number))
            dist.all_reduce(value)
            assert (value == COUNT * number).all()
            Path(f"{slot.path}-{slot.rank}").touch()
            times = None if times is None else times - 1
        dist.destroy_process_group()
    except DureError as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return error
    return None


def begin_with_too_few(slot: Slot, variables: dict[str, str]) -> object:
    """Fail to begin, and keep the store open afterwards for as long as the test takes."""
    rendezvous._LATE_S = PATIENCE_S
    return reduce(slot, variables, 1, None, timeout_s=2.0)


def wait_for_a_rank(slot: Slot, variables: dict[str, str]) -> object:
    """Reduce without end; leave a file when this rank has come and waits for the others.

    Before, it has a connection and no answer, and cannot tell one store from the next.
    """
    real = rendezvous._await_outcome

    def await_outcome(*args: Any, **options: Any) -> Any:
        Path(f"{slot.path}-waits-{slot.rank}").touch()
        return real(*args, **options)

    rendezvous._await_outcome = await_outcome
    return reduce(slot, variables, 1, None)


@contextmanager
def two_jobs(folder: Path) -> Iterator[tuple[list[Host], dict[str, str], Ranks, Ranks]]:
    """Make hosts; yield them, the variables of both jobs, and the ranks of each."""
    with (
        hosts(2, "again") as made,
        forked_ranks(made, EACH, folder / "old") as old,
        forked_ranks(made, EACH, folder / "new") as new,
    ):
        yield made, variables_of(made, EACH, folder / "key"), old, new


@pytest.mark.parametrize("num_started", [COUNT, COUNT - 1], ids=["trains", "waits for a rank"])
def test_ranks_left_of_a_job_do_not_join_the_next_one(num_started: int, tmp_path: Path):
    with two_jobs(tmp_path) as (made, variables, old, new):
        if num_started == COUNT:
            old.start(reduce, variables, 1, None, size=COUNT)
        else:
            old.start(wait_for_a_rank, variables, size=num_started)
        until(
            lambda: len(list((tmp_path / "old").glob("call1-*"))) == num_started,
            "ranks that reduce, or wait",
        )
        os.kill(old.pids[0], signal.SIGKILL)
        until(lambda: not made[0].listens(PORT), "the end of rank 0")
        new.start(reduce, variables, 100, 5)
        assert new.values() == [None] * COUNT
        for rank in range(1, num_started):
            error = old.result(rank)
            assert isinstance(error, DureError)


def test_a_job_does_not_begin_in_the_store_of_one_that_could_not_begin(tmp_path: Path):
    """Rank 0 serves on for a second, so that ranks which come late learn why."""
    with two_jobs(tmp_path) as (_, variables, old, new):
        old.start(begin_with_too_few, variables, size=COUNT - 1)
        assert isinstance(old.result(0), RendezvousTimeout)
        new.start(reduce, variables, 100, 5)
        for rank in range(COUNT):
            error = new.result(rank)
            assert isinstance(error, RendezvousError)
            if rank < COUNT - 1:  # the last one's number is still waited for in the old job
                assert "taken by the store of another job" in str(error)
                assert "rank 0 (pid" in error.seen and " on a)" in error.seen
