"""What the log says of refused connections, and the limit of descriptors: without a server."""

import logging
import resource

import pytest

from dure.store import router
from dure.store.router import RefusalLog


def test_refusals_are_counted_and_reported_rarely(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "dure.store")
    now = 0.0
    monkeypatch.setattr(router.time, "monotonic", lambda: now)
    refusals = RefusalLog("the store at tcp://here")
    for now in (0.0, 1.0, 9.999, 10.0, 11.0):
        refusals.add(f"10.0.0.77:{now:g}", "it left")
    assert caplog.messages == [
        "the store at tcp://here refused 10.0.0.77:0: it left",
        "the store at tcp://here refused 10.0.0.77:10 and 2 before it: it left",
    ]


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
