"""Fixtures of tests whose ranks are threads."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["gathered", "shared"])
def way(request: pytest.FixtureRequest) -> str:
    """Yield each strategy of `fully_shard`."""
    return request.param
