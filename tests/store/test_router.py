"""What the log says of refused connections, and the limit of descriptors: without a server."""

import logging
import resource

import pytest

from dure.store import router
from dure.store.router import RefusalLog


def test_refusals_are_counted_and_reported_rarely(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dure.store")
    refusals = RefusalLog("the store at tcp://here")

    def reported(now: float) -> list[str]:
        caplog.clear()
        refusals.report(now)
        return [record.getMessage() for record in caplog.records]

    assert (reported(0.0), refusals.due()) == ([], None)
    refusals.add("10.0.0.77:51234", "it has another job key")
    assert reported(0.0) == [
        "the store at tcp://here refused 10.0.0.77:51234: it has another job key"
    ]
    for port in range(3):
        refusals.add(f"10.0.0.99:{port}", "it left")
    assert refusals.due() == 10.0
    assert reported(9.999) == []
    assert reported(10.0) == ["the store at tcp://here refused 10.0.0.99:2 and 2 more: it left"]
    assert refusals.due() is None


def test_the_limit_of_descriptors_is_raised_when_connections_need_them() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    small = min(512, soft)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (small, hard))
        router._have_descriptors_for(small // 4 - 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == small
        router._have_descriptors_for(small // 4)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > small
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
