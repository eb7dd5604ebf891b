"""What all tests of the architecture do around reading the sources."""

import gc
from collections.abc import Iterator

import pytest

from tests.arch.sources import lines_of, tree_of


@pytest.fixture(scope="module", autouse=True)
def sources_only_here() -> Iterator[None]:
    """Parse without collecting garbage, and keep nothing for the tests of other folders.

    Syntax trees are a million small objects: looking through them takes four times as long as
    making them, and would again whenever a later test collects.
    """
    gc.disable()
    yield
    tree_of.cache_clear()
    lines_of.cache_clear()
    gc.enable()
