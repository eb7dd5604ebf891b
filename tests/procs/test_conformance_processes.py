"""The conformance suite over processes: the shm backend, and Gloo."""

from __future__ import annotations

import pytest

from conformance import suite
from dure.native import available as native_available

GLOO_CANNOT = (
    # Gloo has no signatures, and folds the ranks in its own order.
    "case_other_operation",
    "case_other_count",
    "case_other_large_count",
    "case_other_dtype",
    "case_other_root",
    "case_other_reduction",
    "case_mismatch_of_async_operations",
    "case_order_of_reduction_is_that_of_ranks",
)


@pytest.mark.skipif(not native_available()[0], reason=native_available()[1] or "no engine")
@pytest.mark.parametrize("subject", suite.SUBJECTS)
@pytest.mark.parametrize(
    "n", [1, 2, 3, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]
)
def test_shm_backend_keeps_the_contract(n, subject, process_pool):
    ran = process_pool(n, "shm").run(suite.run, subject)
    assert ran[0] == ran[-1]
    assert len(ran[0]) >= 5


@pytest.mark.parametrize("subject", suite.SUBJECTS)
@pytest.mark.parametrize(
    "n", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 5, 8))]
)
def test_gloo_backend_keeps_the_contract(n, subject, process_pool):
    ran = process_pool(n, "gloo").run(suite.run, subject, GLOO_CANNOT)
    assert ran[0] == ran[-1]
    assert len(ran[0]) >= 5
