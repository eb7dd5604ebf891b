"""Schedules by name."""

import pytest

from dure.errors import UsageError
from dure.schedules import SCHEDULES, find_generator, make_schedule


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "microbatches", "fix"),
    [
        ("1f1b", 8, 4, 8, "4 stages, or take interleaved-1f1b."),
        ("1f1b", 7, 4, 8, "4 stages."),
        ("ZBVZeroBubble", 6, 2, 8, "4 stages"),
        ("dualpipe-v", 4, 2, 3, "4 microbatches"),
        ("interleaved-1f1b", 4, 2, 5, "Take 4 or 6 microbatches"),
        ("looped-bfs", 5, 2, 4, "4 stages"),
        ("gpipe", 2, 2, 0, "1 microbatches"),
        ("gpipe", 2, 0, 2, "Take 1."),
        ("2f2b", 2, 2, 2, "1f1b, interleaved-1f1b"),
    ],
)
def test_the_error_of_a_misfit_says_what_fits(name, stages, ranks, microbatches, fix):
    with pytest.raises(UsageError) as error:
        make_schedule(name, stages=stages, microbatches=microbatches, ranks=ranks)
    assert fix in error.value.fix


def test_schedules_are_found_by_torchs_names():
    assert all(find_generator(generator.torch_name) is generator for generator in SCHEDULES)
