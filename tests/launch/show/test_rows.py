"""What the page of a run gets of each rank."""

from __future__ import annotations

import os

import pytest

from dure.launch.ranks.report import Step
from dure.launch.show.rows import REFRESH_S, Rows, plain


def test_rows_have_state_step_and_last_line() -> None:
    rows = Rows()
    for rank in range(3):
        rows.started(rank, os.getpid())
    rows.progressed(0, Step(step=30, total=60, values={"loss": 0.25}))
    rows.wrote(0, b"\x1b[31mepoch 2\x1b[0m", 5.0)
    rows.crashed(1, "ValueError: my bug")
    rows.ended(2, ok=True)
    rows.wrote(2, b"too late", 0.0)
    first, second, third = rows.look(1e6)
    assert first.step == Step(step=30, total=60, values={"loss": 0.25})
    assert (first.state, first.last, first.spoke_at) == ("running", "epoch 2", 5.0)
    assert first.resident is not None
    assert (second.state, second.last) == ("failed", "ValueError: my bug")
    assert (third.state, third.last, third.resident) == ("ended", "", None)
    assert rows.due_at == 1e6 + REFRESH_S
    rows.started(1, os.getpid())  # in the place of the failed one
    assert rows.look(1e6)[1].state == "running"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"10%\r20%\r", "20%"),
        (b"\x1b[2K\x1b[1mbold\x1b[0m", "bold"),
        (b"\x1b]0;title\x07text", "text"),
        (b"\xff\x00tab\there", "\ufffd tab here"),
        ("두레".encode(), "두레"),
    ],
)
def test_line_is_shown_without_control_characters(line: bytes, shown: str) -> None:
    assert plain(line) == shown
