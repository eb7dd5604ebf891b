"""What several tests of hosts need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.ways import HostJobs


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[HostJobs]:
    """Return what starts jobs whose ranks reduce; whatever is left ends with the test."""
    made = HostJobs(tmp_path, "tests.hosts.reducing")
    with made.stack:
        yield made
