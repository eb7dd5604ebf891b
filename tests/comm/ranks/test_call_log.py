"""Lines of the log about classes of calls."""

from __future__ import annotations

import logging

import pytest
import torch

import dure as dist
from dure.comm.group import call_log
from dure.testing import run_ranks
from dure.trace import events

NATIVE = dist.is_backend_available("shm")


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
