"""A breakpoint in one rank of a job."""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from datetime import timedelta

import pytest

import dure as dist
from dure.comm.world import current_world
from dure.testing import run_ranks

module = importlib.import_module("dure.comm.breakpoint")


class Debugger:
    """In place of pdb: notes who stops, and with which timeout."""

    def __init__(self) -> None:
        self.stopped: list[tuple[int, timedelta]] = []

    def message(self, text: str) -> None:
        assert "up" in text

    def set_trace(self) -> None:
        group = current_world().need_default()
        self.stopped.append((group.rank(), group.timeout))


def test_one_rank_stops_while_the_others_wait_3_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    debugger, passed = Debugger(), threading.Barrier(3)
    monkeypatch.setattr(module, "_debugger", lambda: debugger)
    monkeypatch.setattr(module, "_calls", Counter())

    def program(rank: int) -> None:
        group = current_world().need_default()
        before = group.timeout
        for _ in range(2):
            dist.breakpoint(1, skip=1, timeout_s=7200)
            passed.wait()
        assert group.timeout == before

    run_ranks(3, program)
    assert debugger.stopped == [(1, timedelta(hours=2))]
