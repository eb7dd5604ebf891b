"""SIGUSR2: whose handler it is, and what it leaves."""

from __future__ import annotations

import faulthandler
import json
import signal

import msgspec
import pytest

from dure.trace import dump, signals
from tests.trace.made_up import ring_of

pytestmark = pytest.mark.usefixtures("recorder")


@pytest.fixture
def handler():
    """The handler of SIGUSR2, installed."""
    signals.install()
    yield
    signals.remove()


def test_sigusr2_is_taken_only_where_the_program_has_no_handler():
    before = signal.getsignal(signal.SIGUSR2)
    assert before is signal.SIG_DFL
    try:
        signals.install()
        ours = signal.getsignal(signal.SIGUSR2)
        assert ours is not signal.SIG_DFL
        signals.remove()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signals.install()
        signals.remove()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_sigusr2_is_left_to_faulthandler_which_python_does_not_know_of(tmp_path):
    with open(tmp_path / "stacks", "w+") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks)
        try:
            signals.install()
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
            signal.raise_signal(signal.SIGUSR2)
        finally:
            faulthandler.unregister(signal.SIGUSR2)
        stacks.seek(0)
        assert "most recent call first" in stacks.read()


def test_sigusr2_in_the_midst_of_a_dump_leaves_whole_files(folder, handler, monkeypatch):
    ring = ring_of(num_ops=3)
    encode = msgspec.json.encode

    def interrupted(content: object) -> bytes:
        monkeypatch.setattr(msgspec.json, "encode", encode)
        signal.raise_signal(signal.SIGUSR2)
        return encode(content)

    monkeypatch.setattr(msgspec.json, "encode", interrupted)
    path = dump()
    assert json.loads(path.read_text())["reason"] == "dump()"
    assert list(folder.iterdir()) == [path]
    del ring


def test_sigusr2_writes_a_dump_and_says_where(folder, handler, capfd):
    ring = ring_of()
    signal.raise_signal(signal.SIGUSR2)
    assert json.loads((folder / "rank3.json").read_text())["reason"] == "SIGUSR2"
    assert str(folder / "rank3.json") in capfd.readouterr().err
    del ring
