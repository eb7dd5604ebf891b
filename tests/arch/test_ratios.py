"""The comparison of benchmarks that pull requests must pass."""

import pytest

from tests.arch.sources import script

ratios = script("scripts/ratios")


def test_a_ratio_is_the_shortest_time_of_shm_over_that_of_gloo():
    times = ratios.Times("python")
    for backend, *samples in (("gloo", 500e-6, 200e-6), ("shm", 2e-6), ("shm", 9e-6, 1e-6)):
        cell = {"op": "broadcast", "num_bytes": 8, "samples_s": samples}
        times.add(times.shortest[backend], [cell])
    assert times.ratios() == pytest.approx({("broadcast", 8): 0.005})


@pytest.mark.parametrize(("here", "behind"), [(0.5, False), (0.54, False), (0.56, True)])
def test_a_ratio_a_tenth_above_the_others_is_behind(here, behind):
    at = ("broadcast", 4096)
    assert ratios.fallen({at: here}, {at: 0.5}, 0.10) == [(at, here, 0.5, behind)]


def test_a_ratio_that_is_missing_here_is_behind():
    at = ("broadcast", 4096)
    assert ratios.fallen({}, {at: 0.5}, 0.10) == [(at, float("inf"), 0.5, True)]
