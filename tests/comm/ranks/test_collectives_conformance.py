"""The conformance suite over the threads backend."""

import pytest

from dure.testing import run_ranks
from tests.comm.conformance import suite


@pytest.mark.parametrize(
    "n", [1, 2, 3, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]
)
@pytest.mark.parametrize("subject", suite.SUBJECTS)
def test_threads_backend_keeps_the_contract(subject, n):
    suite.check(run_ranks(n, suite.run, subject), subject)
