"""What a rank tells its launcher while it runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import dure
from dure.trace import line


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Be a rank with a launcher, for the test."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    published = ModuleType("__dure_line__")
    published.__dict__.update(fd=write, pid=os.getpid(), stack_signal=0)
    monkeypatch.setitem(sys.modules, "__dure_line__", published)
    monkeypatch.setattr(line, "_next_at", 0.0)
    yield read
    os.close(read)
    os.close(write)


def told(pipe: int) -> list[dict[str, Any]]:
    try:
        data = os.read(pipe, 1 << 16)
    except BlockingIOError:
        return []
    return [json.loads(text) for text in data.split(b"\n") if text]


def test_progress_is_told_ten_times_a_second_and_at_the_end(
    pipe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = (step / 16 for step in range(100))
    monkeypatch.setattr(line, "time", SimpleNamespace(monotonic=lambda: next(times)))
    for step in range(1, 101):
        dure.progress(step, 100, loss=0.5)
    steps = [message["progress"]["step"] for message in told(pipe)]
    assert steps == [*range(1, 100, 2), 100]


def test_progress_never_waits_for_the_launcher(pipe: int) -> None:
    for _ in range(2000):  # far more than a pipe holds
        dure.progress(1, 1, note="x" * 200)
    assert told(pipe)[0]["progress"]["values"] == {"note": "x" * 200}


def test_child_of_a_rank_tells_nothing(pipe: int) -> None:
    sys.modules["__dure_line__"].__dict__["pid"] = os.getpid() + 1
    dure.progress(1, 1)
    assert told(pipe) == []


def test_rank_without_operations_says_so(pipe: int) -> None:
    line.send_last_operation()
    assert isinstance(told(pipe)[0]["last"], str)


def test_without_a_launcher_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "__dure_line__", raising=False)
    dure.progress(1, 1)
    line.answer_launcher()
