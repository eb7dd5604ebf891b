"""Fixtures of tests of remote calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rpc.gates import Cluster, Gate


@pytest.fixture(autouse=True)
def _gate() -> Iterator[None]:
    """Make a new gate; open it at the end, for calls that no test has waited for."""
    Gate.renew()
    yield
    Gate.open.set()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Yield four workers, with distributed autograd."""
    with Cluster(4) as made:
        yield made
