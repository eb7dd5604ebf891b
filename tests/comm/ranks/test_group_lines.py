"""Lines of the log about groups and decisions."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from torch import nn

import dure as dist
from dure.testing import run_ranks
from dure.trace import events, logs

pytestmark = pytest.mark.usefixtures("off_afterwards")


@pytest.fixture
def off_afterwards() -> Iterator[None]:
    yield
    dist.set_debug_level(dist.DebugLevel.OFF)


def _wrap_and_group(rank: int) -> None:
    dist.DistributedDataParallel(nn.Linear(4, 2))
    dist.new_group([0, 1], group_desc="pairs")


def test_without_a_level_nothing_is_written_and_no_call_is_watched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(rank: int) -> None:
        _wrap_and_group(rank)
        assert events.hooks == []

    run_ranks(2, body)
    assert [r for r in caplog.records if r.name.startswith("dure")] == []


@pytest.mark.parametrize(
    ("level", "shown"), [("OFF", None), ("INFO", logging.INFO), ("DETAIL", logging.DEBUG)]
)
def test_debug_level_shows_lines_unless_dure_log_is_set(
    monkeypatch: pytest.MonkeyPatch, level: str, shown: int | None
) -> None:
    plain = logging.getLogger().level
    dist.set_debug_level(dist.DebugLevel[level])
    assert dist.get_debug_level() is dist.DebugLevel[level]
    assert logging.getLogger("dure").getEffectiveLevel() == (shown or plain)
    monkeypatch.setenv("DURE_LOG", "error")
    logs.configure()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    assert logging.getLogger("dure").level == logging.ERROR
    monkeypatch.delenv("DURE_LOG")
    logs.configure()
