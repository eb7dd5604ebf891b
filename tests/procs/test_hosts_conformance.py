"""The conformance suite over the hybrid backend, on hosts that are only pretended."""

from __future__ import annotations

import pytest

from conformance import suite
from dure.native import available as native_available
from dure.testing import ProcessPool

PLACEMENTS = (
    "aabb",
    "abb",
    *(pytest.param(hosts, marks=pytest.mark.slow) for hosts in ("abbb", "abab", "abcc", "abc")),
)
OF_ONE_HOST = ("case_order_of_reduction_is_that_of_ranks",)  # hosts are folded one after another

pytestmark = pytest.mark.skipif(
    not native_available()[0], reason=native_available()[1] or "no engine"
)


@pytest.fixture(scope="module", params=PLACEMENTS)
def pool(request):
    with ProcessPool(len(request.param), "hybrid", hosts=request.param) as pool:
        yield pool


@pytest.mark.parametrize("subject", suite.SUBJECTS)
def test_hybrid_backend_keeps_the_contract(pool, subject):
    ran = pool.run(suite.run, subject, OF_ONE_HOST)
    assert ran[0] == ran[-1]
    assert len(ran[0]) >= 5
