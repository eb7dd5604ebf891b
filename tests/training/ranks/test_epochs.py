"""Epochs that a rank drops while others still signal."""

from __future__ import annotations

from datetime import timedelta

import pytest

import dure
from dure.comm.world import resolve
from dure.testing import run_ranks
from dure.training.epochs import Epochs


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_have_dropped_their_epochs_are_signaled_without_harm(size: int) -> None:
    """Nothing that they have allocated since is written."""

    def body(rank: int) -> None:
        group = resolve(None, "test")
        epochs = Epochs(group)
        epochs.begin_read()
        if rank == 0:
            del epochs
            others = [dure.symmetric_memory.empty(64) for _ in range(8)]
            for each in others:
                each.zero_()
            dure.barrier()
            dure.barrier()
            assert not any(each.any() for each in others)
        else:
            dure.barrier()
            epochs.end_read(together=False)
            dure.barrier()

    run_ranks(size, body)


def test_a_rank_that_runs_the_model_alone_is_told_to_let_all_run_it() -> None:
    """As in an evaluation on rank 0, which waits for a rank that trains on, until the timeout."""

    def body(rank: int) -> str:
        group = resolve(dure.new_group(), "test")
        epochs = Epochs(group)
        epochs.begin_read()
        group.set_timeout(timedelta(seconds=0.2))
        if rank == 1:
            dure.barrier()
            return ""
        with pytest.raises(dure.CommTimeout) as caught:
            epochs.end_read(together=True)
        dure.barrier()
        return caught.value.__notes__[0]

    assert run_ranks(2, body) == [
        "Rank 1 has not finished the step of this model that rank 0 has finished. All ranks that "
        "share parameters must run the model together; run an evaluation on all of them.",
        "",
    ]
