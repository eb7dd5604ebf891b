"""Tests of the thread that looks at groups over NCCL."""

from __future__ import annotations

import pytest

from dure.comm.backends.engine import watchdog


class _Group:
    """A group that is looked at; a look of it may fail."""

    group_name = "pairs"

    def __init__(self, error: Exception | None = None, again: bool = True) -> None:
        self.error, self.again, self.looks = error, again, 0

    def look(self) -> bool:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.again


@pytest.fixture
def watched(monkeypatch):
    """Return what looks at groups, without the thread that does so in a program."""
    monkeypatch.setattr(watchdog, "_groups", watchdog.WeakSet())
    monkeypatch.setattr(watchdog, "_thread", object())
    return watchdog._groups


def test_a_look_that_fails_is_the_last_of_its_group_and_of_no_other(watched, caplog):
    broken, sound = _Group(RuntimeError("CUDA error")), _Group()
    watched.update((broken, sound))
    assert watchdog._look_once()
    assert watchdog._look_once()
    said = "group 'pairs' is not watched any more: RuntimeError: CUDA error"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert (broken.looks, sound.looks) == (1, 2)


def test_no_thread_looks_at_no_groups(watched):
    group = _Group(again=False)
    watched.add(group)
    assert watchdog._look_once()
    assert not watchdog._look_once()
    assert watchdog._thread is None
    assert group.looks == 1
