"""A rank is killed: the survivors' flight records tell of it."""

from __future__ import annotations

import pytest

from dure.errors import LaunchError
from dure.native import available as native_available
from dure.testing import ProcessPool
from dure.trace.events import State
from dure.trace.findings import study
from dure.trace.merging import read
from procs import flight_ranks

BACKENDS = [
    pytest.param(
        "shm",
        marks=pytest.mark.skipif(
            not native_available()[0], reason=native_available()[1] or "no engine"
        ),
    ),
    "gloo",
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_records_of_survivors_of_3_name_the_rank_that_was_killed(backend, tmp_path):
    with ProcessPool(3, backend) as pool, pytest.raises(LaunchError):
        pool.run(flight_ranks.lose_rank_1, str(tmp_path))
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
