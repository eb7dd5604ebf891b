"""Random programs of some operators, views and writes among them, against plain torch.

Placements, uneven and empty parts, strides of tensors, of their parts and of gradients are drawn.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.tensor.extension import use_native
from dure.testing import run_ranks
from tests.tensor.ranks import programs
from tests.tensor.ranks.programs import Step

NUMBERS = st.integers(0, 255)
STEPS = st.lists(st.builds(Step, NUMBERS, NUMBERS, NUMBERS, NUMBERS), min_size=3, max_size=8)
PROGRAMS = {
    "codes": st.lists(NUMBERS, min_size=2, max_size=3),
    "ways": st.lists(NUMBERS, min_size=3, max_size=3),
    "program": STEPS,
    "by_extension": st.booleans(),
    "sizes": st.sampled_from([(2,), (3,), (2, 2), (3, 2), (2, 1, 2)]),
}


def check(sizes, by_extension, **program):
    """Run a program; hits of plans are found by the extension, where it was built, or by Python."""
    use_native(by_extension)
    try:
        programs.check(partial(run_ranks, math.prod(sizes)), **program, sizes=sizes)
    finally:
        use_native(True)


@settings(max_examples=100)
@given(**PROGRAMS)
def test_programs_give_the_results_of_full_tensors(**program):
    check(**program)


@pytest.mark.slow
@settings(max_examples=1_250)
@given(**PROGRAMS)
@pytest.mark.parametrize("number", range(8))  # each below the limit of a test
def test_10_000_programs_give_the_results_of_full_tensors(number, **program):
    check(**program)
