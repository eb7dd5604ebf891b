"""Random programs of some operators, views and writes among them, against plain torch.

`DURE_PROGRAMS=20000 pytest tests/tensor/ranks/test_dispatch_programs.py` runs more of them.
"""

from __future__ import annotations

import math
import os
import warnings

from hypothesis import given, settings
from hypothesis import strategies as st

from dure.testing import run_ranks
from tests.tensor.ranks.operators import REFUSED, RIGHT
from tests.tensor.ranks.programs import Step, compare, execute, expect

NUMBERS = st.integers(0, 255)
STEPS = st.lists(st.builds(Step, NUMBERS, NUMBERS, NUMBERS, NUMBERS), min_size=3, max_size=8)


@settings(max_examples=int(os.environ.get("DURE_PROGRAMS", "150")))
@given(
    codes=st.lists(NUMBERS, min_size=2, max_size=3),
    ways=st.lists(NUMBERS, min_size=3, max_size=3),
    program=STEPS,
    sizes=st.sampled_from([(2,), (3,), (2, 2)]),
)
def test_programs(codes, ways, program, sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps, expected = expect(codes, program)
        count = len(expected.results)
        runs = run_ranks(math.prod(sizes), lambda rank: execute(codes, steps, ways, sizes, count))
        result = compare(expected, runs, sizes)
    assert result.outcome in (RIGHT, REFUSED), f"{result} on {sizes}"
