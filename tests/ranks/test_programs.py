"""Random programs of some operators, views and writes among them, against plain torch.

`DURE_PROGRAMS=20000 pytest tests/ranks/test_programs.py` runs more of them.
"""

from __future__ import annotations

import math
import os
import warnings

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dure.testing import run_ranks
from ranks.programs import REFUSED, Step, expect, fault

COUNT = int(os.environ.get("DURE_PROGRAMS", "300"))
NUMBERS = st.integers(0, 255)
STEPS = st.lists(st.builds(Step, NUMBERS, NUMBERS, NUMBERS, NUMBERS), min_size=3, max_size=8)


@settings(
    max_examples=COUNT,
    deadline=None,
    derandomize="DURE_PROGRAMS" not in os.environ,
    suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
)
@given(
    codes=st.lists(NUMBERS, min_size=2, max_size=3),
    ways=st.lists(NUMBERS, min_size=3, max_size=3),
    program=STEPS,
    sizes=st.sampled_from([(2,), (3,), (2, 2)]),
)
def test_programs(codes, ways, program, sizes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = expect(codes, program)
        faults = run_ranks(math.prod(sizes), lambda rank: fault(codes, expected, ways, sizes))
    names = [name for _, name in expected.steps]
    wrong = [said for said in faults if said is not None and not said.startswith(REFUSED)]
    assert not wrong, f"{names} on {sizes}: {wrong}"
