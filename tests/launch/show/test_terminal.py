"""What a user sees of many ranks: their lines and tracebacks."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dure.launch import JobSpec
from dure.launch.ranks.environment import Round
from dure.launch.show.output import IDLE_S
from dure.launch.show.terminal import Terminal

ROUND = Round.of(hosts=("h",), nprocs=(2,), master_addr="127.0.0.1", master_port=1, store="h:1")
VALUE = b"""before
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    main()
ValueError: one
"""
KEY = VALUE.replace(b"ValueError: one", b"KeyError: 'two'")


def begun(**fields: Any) -> Terminal:
    terminal = Terminal(JobSpec(**{"program": "p", "nproc": 2} | fields))
    terminal.begin(ROUND)
    return terminal


def shown(capfd: pytest.CaptureFixture[str], *parts: tuple[int, bytes], **fields: Any) -> list[str]:
    """Let ranks write to their errors, and return what was seen."""
    terminal = begun(**fields)
    readers = [terminal.reader(rank, "stderr") for rank in range(2)]
    for rank, text in parts:
        terminal.received(readers[rank], text, 0.0)
        terminal.tick(0.0)
    terminal.finish()
    return capfd.readouterr().err.splitlines()


@pytest.mark.parametrize("cut", [None, 70])
def test_different_tracebacks_are_not_shown_under_one_header(
    capfd: pytest.CaptureFixture[str], cut: int | None
) -> None:
    parts = [(0, VALUE[:cut]), (1, KEY[:cut])]
    parts += [(0, VALUE[cut:]), (1, KEY[cut:])] if cut else []
    assert shown(capfd, *parts) == [
        "[0-1] before",
        *(f"[0] {line}" for line in VALUE.decode().splitlines()[1:]),
        *(f"[1] {line}" for line in KEY.decode().splitlines()[1:]),
    ]


def test_equal_tracebacks_are_shown_once_unless_nothing_folds(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lines = VALUE.decode().splitlines()
    assert shown(capfd, (0, VALUE), (1, VALUE)) == [f"[0-1] {line}" for line in lines]
    each = [f"[{rank}] {line}" for rank in (0, 1) for line in lines]
    assert shown(capfd, (0, VALUE), (1, VALUE), fold=False) == each


def test_unfinished_line_is_shown_behind_what_waits_and_goes_on_behind_itself(
    capfd: pytest.CaptureFixture[str],
) -> None:
    terminal = begun()
    one, two = (terminal.reader(rank, "stdout") for rank in range(2))
    terminal.received(one, b"waits\n", 0.0)
    terminal.received(two, b"Name? ", 0.0)
    terminal.tick(IDLE_S)
    assert capfd.readouterr().out == "[0] waits\n[1] Name? "
    terminal.received(two, b"Dure\nlast\n", IDLE_S)
    terminal.received(one, b"Dure\nend", IDLE_S)  # which is no end of that line
    terminal.finish()
    terminal.sinks[0].write_some()
    assert capfd.readouterr().out == "Dure\n[1] last\n[0] Dure\n[0] end\n"


def test_traceback_without_an_end_is_shown_after_a_while(capfd: pytest.CaptureFixture[str]) -> None:
    terminal = begun(fold=False)
    begun_only = b"Traceback (most recent call last):\n"
    terminal.received(terminal.reader(0, "stderr"), begun_only, 5.0)
    for now, text in ((5.0, ""), (5.0 + IDLE_S, f"[0] {begun_only.decode()}")):
        terminal.tick(now)
        assert capfd.readouterr().err == text


def test_bars_of_two_ranks_are_drawn_one_below_the_other_within_a_moment(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.get_terminal_size", lambda fd: os.terminal_size((80, 24)))
    monkeypatch.delenv("TERM", raising=False)
    terminal = begun()
    for sink in terminal.sinks:
        sink.terminal = True
    readers = [terminal.reader(rank, "stderr") for rank in range(2)]
    for rank, reader in enumerate(readers):
        terminal.received(reader, b"\r10%% of %d" % rank, 5.0)
    terminal.tick(5.0)
    begin, end = "\x1b[?7l", "\x1b[0m\n\x1b[?7h"
    assert capfd.readouterr().err == f"{begin}[0] 10% of 0\x1b[0m\n[1] 10% of 1{end}"
    terminal.received(readers[1], b"\r20% of 1", 5.01)
    assert terminal.wake_at is not None and terminal.wake_at < 5.2
    terminal.tick(terminal.wake_at)
    erase = "\x1b[2F\x1b[J"
    assert capfd.readouterr().err == f"{erase}{begin}[0] 10% of 0\x1b[0m\n[1] 20% of 1{end}"
    terminal.finish()
    assert capfd.readouterr().err == f"{erase}[0] 10% of 0\n[1] 20% of 1\n"


def test_timestamps_come_before_each_line(capfd: pytest.CaptureFixture[str]) -> None:
    lines = shown(capfd, (0, b"one\ntwo\n"), timestamps=True)
    assert len(lines) == 2
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} \[0\] (one|two)", line) for line in lines)


def test_what_was_shown_is_known_but_of_long_lines_their_beginnings(
    capfd: pytest.CaptureFixture[str],
) -> None:
    terminal = begun(prefix="none")
    told = b"[rank1]: Traceback:\n\n[rank1]:   File\n[rank1]: ValueError: late\n"  # by torch
    terminal.received(terminal.reader(1, "stderr"), told + b"x" * 100_000 + b"\n", 0.0)
    terminal.finish()
    assert terminal.has_shown(1, "Traceback:\n\n  File\nValueError: late\n")
    assert not terminal.has_shown(1, "KeyError: late")
    assert not terminal.has_shown(0, "ValueError: late")
    assert not terminal.has_shown(1, "x" * 100_000)
    assert len(capfd.readouterr().err) > 100_000


def test_full_disk_is_told_once_and_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("launcher.log", "attempt_0/rank_0/stdout.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to("/dev/full")
    terminal = begun(prefix="none", log_dir=tmp_path)
    reader = terminal.reader(0, "stdout")
    terminal.received(reader, b"first\n", 0.0)
    terminal.received(reader, b"second\n", 0.0)
    (tmp_path / "attempt_1").write_text("in the way, as a full disk is")
    terminal.begin(replace(ROUND, number=1))
    terminal.received(terminal.reader(0, "stdout"), b"third\n", 0.0)
    terminal.finish()
    out, err = capfd.readouterr()
    assert out.split() == ["first", "second", "third"]
    assert err.count("\n") == 1
    assert "No space left on device" in err
