"""Stores by URL, and schemes that programs add."""

from datetime import timedelta
from pathlib import Path

import pytest

from dure.errors import RendezvousError, UsageError
from dure.store import HashStore
from dure.store import rendezvous as meetings
from dure.store.handlers import _handlers, register_rendezvous_handler, rendezvous


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Register `mine://`, whose store is in memory; what its handler was called with."""
    monkeypatch.setattr("dure.store.handlers._handlers", {})
    found: list[tuple[str, object]] = []

    def handler(url, **kwargs):
        found.append((url, kwargs))
        yield HashStore(), 0, 1

    register_rendezvous_handler("mine", handler)
    return found


def test_a_url_gives_a_store_and_numbers_once(tmp_path: Path):
    found = rendezvous(f"file://{tmp_path}/store?rank=0", world_size=1)
    store, rank, world_size = next(found)
    store.set("key", "value")
    assert (store.get("key"), rank, world_size) == (b"value", 0, 1)
    with pytest.raises(RendezvousError):
        next(found)


def test_a_scheme_of_a_program_is_called_with_the_numbers_that_are_known(calls):
    limit = timedelta(seconds=3)
    next(rendezvous("mine://host?a=b", 0, timeout=limit))
    met = meetings.rendezvous("mine://host", 0, 1, timeout=limit)
    assert (met.rank, met.world_size) == (0, 1)
    met.close()
    assert calls == [
        ("mine://host?a=b&rank=0", {"timeout": limit}),
        ("mine://host?rank=0&world_size=1", {"timeout": limit}),
    ]


@pytest.mark.parametrize("scheme", ["tcp", "mine"])
def test_a_scheme_has_one_handler(calls, scheme: str):
    with pytest.raises(UsageError):
        register_rendezvous_handler(scheme, lambda url: iter(()))
    assert set(_handlers) == set()  # those of the process, outside of this test
