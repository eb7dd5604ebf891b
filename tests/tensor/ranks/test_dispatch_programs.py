"""Random programs of some operators, views and writes among them, against plain torch.

Placements, uneven and empty parts, strides of tensors, of their parts and of gradients are drawn.
"""

from __future__ import annotations

import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.testing import run_ranks
from tests.tensor.ranks.operators import REFUSED, RIGHT
from tests.tensor.ranks.programs import Step, compare, execute, expect

NUMBERS = st.integers(0, 255)
STEPS = st.lists(st.builds(Step, NUMBERS, NUMBERS, NUMBERS, NUMBERS), min_size=3, max_size=8)
PROGRAMS = {
    "codes": st.lists(NUMBERS, min_size=2, max_size=3),
    "ways": st.lists(NUMBERS, min_size=3, max_size=3),
    "program": STEPS,
    "sizes": st.sampled_from([(2,), (3,), (2, 2)]),
}


def check(codes, ways, program, sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps, expected = expect(codes, program)
        count = len(expected.results)
        runs = run_ranks(math.prod(sizes), lambda rank: execute(codes, steps, ways, sizes, count))
        result = compare(expected, runs, sizes)
    assert result.outcome in (RIGHT, REFUSED), f"{result} on {sizes}"


@settings(max_examples=30)
@given(**PROGRAMS)
def test_programs_give_the_results_of_full_tensors(codes, ways, program, sizes):
    check(codes, ways, program, sizes)


@pytest.mark.slow
@settings(max_examples=1_250)
@given(**PROGRAMS)
@pytest.mark.parametrize("number", range(8))  # each below the limit of a test
def test_10_000_programs_give_the_results_of_full_tensors(number, codes, ways, program, sizes):
    check(codes, ways, program, sizes)
