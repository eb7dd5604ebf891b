"""Groups over Gloo: when they are connected, and what is left of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

import dure as dist
from dure.comm.backends.torch_engine import GlooOpening
from dure.errors import PeerLost
from tests.comm.forked_ranks import Ranks, Slot


def die_when_connecting(slot: Slot) -> int | None:
    dist.init_process_group("gloo", slot.url, rank=slot.rank, world_size=slot.size)
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
