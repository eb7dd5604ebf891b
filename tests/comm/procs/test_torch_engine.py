"""Groups over Gloo: when they are connected, and what is left of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

import dure as dist
from dure.comm.backends import reachability
from dure.comm.backends.torch_engine import GlooOpening
from dure.errors import CommError, CommTimeout, PeerLost
from tests.comm.forked_ranks import Ranks, Slot
from tests.waiting import until


def die_when_connecting(slot: Slot) -> int | None:
    slot.init("gloo")
    connect = GlooOpening.connect

    def connect_or_die(opening: GlooOpening, offers: Sequence[bytes]) -> None:
        if slot.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        connect(opening, offers)

    GlooOpening.connect = connect_or_die
    with pytest.raises(PeerLost) as lost:
        dist.new_group()
    return lost.value.peer


def test_a_rank_that_dies_before_gloo_is_connected_is_named_3_ranks(tmp_path):
    with Ranks(3, tmp_path, die_when_connecting) as ranks:
        assert [ranks.result(rank) for rank in (0, 2)] == [1, 1]


def be_late(slot: Slot) -> CommError:
    """Create a group; rank 2 connects when the others have given up."""
    reachability._LIMIT_S, reachability._ANSWER_S = 0.8, 0.4
    connect, gave_up = GlooOpening.connect, [Path(f"{slot.path}-gave-up-{r}") for r in (0, 1)]

    def connect_late(opening: GlooOpening, offers: Sequence[bytes]) -> None:
        if slot.rank == 2:
            until(lambda: all(path.exists() for path in gave_up), "ranks that give up")
        connect(opening, offers)

    GlooOpening.connect = connect_late
    with pytest.raises(CommError) as raised:
        dist.init_process_group(
            "gloo", slot.url, timedelta(seconds=1), rank=slot.rank, world_size=slot.size
        )
    if slot.rank != 2:
        gave_up[slot.rank].touch()
    return raised.value


def test_a_rank_that_is_slow_to_connect_is_named_by_all_3_ranks(tmp_path):
    with Ranks(3, tmp_path, be_late) as ranks:
        *early, late = [ranks.result(rank) for rank in range(3)]
    for error in early:
        assert isinstance(error, CommTimeout) and error.missing == (2,)
        assert error.what == "not all ranks connected in time"
    assert late.what == "this rank connected too late: the others had given up"
    assert late.missing == (2,)
