"""A rank is killed: the survivors' flight records tell of it."""

from __future__ import annotations

import pytest

import dure as dist
from dure.trace.events import State
from dure.trace.findings import study
from dure.trace.merging import read
from tests.comm.forked_ranks import Ranks, Slot
from tests.trace.procs import flight_ranks

BACKENDS = [
    pytest.param(
        "shm",
        marks=pytest.mark.needs("engine"),
    ),
    "gloo",
]


def _loses(slot: Slot, backend: str, folder: str) -> None:
    dist.init_process_group(backend, slot.url, rank=slot.rank, world_size=slot.size)
    flight_ranks.lose_rank_1(slot.rank, folder)


@pytest.mark.parametrize("backend", BACKENDS)
def test_records_of_survivors_of_3_name_the_rank_that_was_killed(backend, tmp_path_factory):
    tmp_path, folder = tmp_path_factory.mktemp("records"), tmp_path_factory.mktemp("ranks")
    with Ranks(3, folder, _loses, backend, str(tmp_path)) as ranks:
        assert ranks.values() == [None] * 3
    flight = read(tmp_path)
    assert list(flight.ranks) == [0, 2] and flight.absent == (1,)
    found = study(flight)
    (absence,) = found.absences
    assert (absence.rank, absence.has_file, absence.missed.op) == (1, False, "all_reduce")
    assert absence.missed.seq == 3 and absence.called_by == (0, 2)
    assert {(r.global_rank, r.seq, r.error, r.state) for r in found.failures} == {
        (rank, 3, "PeerLost", State.FAILED) for rank in (0, 2)
    }
    for rank in (0, 2):
        assert flight.ranks[rank].reason.startswith("PeerLost")
        assert f"rank{rank}.json" in (tmp_path / f"note{rank}").read_text()
