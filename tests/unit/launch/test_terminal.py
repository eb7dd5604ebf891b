"""What the launcher remembers of what it has shown."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dure.launch import JobSpec
from dure.launch.ranks.environment import Round
from dure.launch.show import logs
from dure.launch.show.files import open_in
from dure.launch.show.terminal import Terminal


def test_only_the_beginnings_of_long_lines_are_remembered(
    capfd: pytest.CaptureFixture[str],
) -> None:
    terminal = Terminal(JobSpec(program="p", prefix="none"))
    terminal.begin(
        Round(hosts=("h",), nprocs=(1,), master_addr="127.0.0.1", master_port=1, store="h:1")
    )
    reader = terminal.reader(0, "stderr")
    terminal.received(reader, b"ValueError: short\n" + b"x" * 100_000 + b"\n", 0.0)
    terminal.finish()
    assert terminal.has_shown(0, "ValueError: short")
    assert not terminal.has_shown(0, "x" * 100_000)
    assert len(capfd.readouterr().err) > 100_000


def test_full_disk_is_told_once_and_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_on_a_full_disk(directory: int, path: Path) -> int:
        full = path.name in ("stdout.log", "launcher.log")
        return os.open("/dev/full", os.O_WRONLY) if full else open_in(directory, path)

    monkeypatch.setattr(logs, "open_in", open_on_a_full_disk)
    terminal = Terminal(JobSpec(program="p", prefix="none", log_dir=tmp_path))
    start = Round(hosts=("h",), nprocs=(1,), master_addr="127.0.0.1", master_port=1, store="h:1")
    terminal.begin(start)
    reader = terminal.reader(0, "stdout")
    terminal.received(reader, b"first\n", 0.0)
    terminal.received(reader, b"second\n", 0.0)
    (tmp_path / "attempt_1").write_text("in the way, as a full disk is")
    terminal.begin(replace(start, number=1))
    terminal.received(terminal.reader(0, "stdout"), b"third\n", 0.0)
    terminal.finish()
    out, err = capfd.readouterr()
    assert out.split() == ["first", "second", "third"]
    assert err.count("\n") == 1
    assert "No space left on device" in err


def test_what_torch_marks_with_the_rank_is_recognised(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(JobSpec(program="p", prefix="none"))
    hosts = Round(hosts=("h",), nprocs=(2,), master_addr="127.0.0.1", master_port=1, store="h:1")
    terminal.begin(hosts)
    told = b"[rank1]: Traceback:\n\n[rank1]:   File\n[rank1]: ValueError: late\n"
    terminal.received(terminal.reader(1, "stderr"), told, 0.0)
    terminal.finish()
    assert terminal.has_shown(1, "Traceback:\n\n  File\nValueError: late\n")
    assert not terminal.has_shown(1, "KeyError: late")
    assert not terminal.has_shown(0, "ValueError: late")
    assert "[rank1]: ValueError: late" in capfd.readouterr().err
