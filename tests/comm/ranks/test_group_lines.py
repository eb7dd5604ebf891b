"""Lines of the log about groups, decisions and classes of calls."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

import dure as dist
from dure.comm import group_lines
from dure.comm.group import call_log
from dure.testing import run_ranks
from dure.trace import events, logs

pytestmark = pytest.mark.usefixtures("shown_again")
COMM = logging.getLogger("dure.comm")
NATIVE = dist.is_backend_available("shm")


@pytest.fixture
def shown_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(group_lines, "_reported", set[int]())
    yield
    dist.set_debug_level(dist.DebugLevel.OFF)


def _wrap_and_group(rank: int) -> None:
    dist.DistributedDataParallel(nn.Linear(4, 2))
    dist.new_group([0, 1], group_desc="pairs")


def test_init_ddp_and_a_group_write_four_lines_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dure")
    run_ranks(2, _wrap_and_group)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    world, host, ddp, pairs = lines
    for text in ("'world'", "2 ranks on 1 host", "ranks 0, 1", "cpu:threads"):
        assert text in world
    assert "threads of one process" in world or "asked for" in world
    for text in ("of memory", "control groups", "huge pages", "hardware threads"):
        assert text in host
    for text in ("Linear on 2 ranks", "2 gradients of 40 B", "1 bucket", "an error"):
        assert text in ddp
    for text in ("(pairs)", "as the default group"):
        assert text in pairs


def test_without_a_level_nothing_is_written_and_no_call_is_watched(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(rank: int) -> None:
        _wrap_and_group(rank)
        assert events.hooks == []

    run_ranks(2, body)
    assert [r for r in caplog.records if r.name.startswith("dure")] == []


def test_calls_are_written_at_debug_when_their_class_is_first_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "dure.comm")

    def body(rank: int) -> None:
        for numel in (2, 2, 2, 1000, 1000):
            dist.all_reduce(torch.ones(numel))
        dist.all_reduce(torch.ones(1000), op=dist.ReduceOp.MAX)

    try:
        run_ranks(1, body, backend="shm" if NATIVE else "threads")
        assert events.hooks != []
    finally:
        caplog.set_level(logging.WARNING, "dure.comm")
        call_log.watch()
    assert events.hooks == []
    lines = [r.getMessage() for r in caplog.records if "all_reduce" in r.getMessage()]
    assert len(lines) == 3
    assert ["8 bytes" in lines[0], "4000 bytes" in lines[1], "MAX" in lines[2]] == [True] * 3


def test_calls_are_not_watched_for_a_root_logger_at_debug_nor_after_the_level_has_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(rank: int) -> None:
        assert (events.hooks != []) == (COMM.level == logging.DEBUG)
        caplog.set_level(logging.WARNING, "dure.comm")
        dist.all_reduce(torch.ones(2))
        assert events.hooks == []

    caplog.set_level(logging.DEBUG)
    for level in (logging.NOTSET, logging.DEBUG):
        caplog.set_level(level, "dure.comm")
        run_ranks(1, body, backend="threads")


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


def test_debug_level_comes_from_the_environment_until_one_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dure.comm import queries

    monkeypatch.setattr(queries, "_level", None)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "detail")
    assert dist.get_debug_level() is dist.DebugLevel.DETAIL
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    dist.set_debug_level_from_env()
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "maybe")
    assert dist.get_debug_level() is dist.DebugLevel.INFO
    for wrong in (dist.set_debug_level_from_env, lambda: dist.set_debug_level(cast(Any, "INFO"))):
        with pytest.raises(dist.UsageError):
            wrong()
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
