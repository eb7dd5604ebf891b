"""What the launcher remembers of what it has shown."""

from __future__ import annotations

import pytest

from dure.launch import JobSpec
from dure.launch.ranks.environment import Round
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
