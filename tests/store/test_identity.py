"""Who a process is."""

import errno
import os
from pathlib import Path

import msgspec
import pytest

from dure.errors import UsageError
from dure.store.identity import alive, myself

from .conftest import dead_process


def test_a_process_is_known_by_more_than_its_number() -> None:
    me = myself()
    assert alive(me) is True
    assert alive(msgspec.structs.replace(me, start="1")) is False
    assert alive(msgspec.structs.replace(me, host_id="elsewhere")) is None
    assert alive(dead_process()) is False


def test_without_a_descriptor_to_look_with_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me = myself()

    def refuse(path: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert alive(me) is None


def test_without_proc_processes_are_not_identified(monkeypatch: pytest.MonkeyPatch) -> None:
    me = myself()

    def absent(path: Path) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(Path, "read_text", absent)
    assert alive(me) is None
    with pytest.raises(UsageError, match="/proc is not mounted") as caught:
        myself()
    assert isinstance(caught.value, OSError)  # callers that can do without catch that
