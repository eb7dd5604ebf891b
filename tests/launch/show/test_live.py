"""The table of `dure run --live`, as text."""

from __future__ import annotations

import os
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.launch.ranks.report import Step
from dure.launch.show.live import REFRESH_S, Row, Rows, draw, plain

_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_text = st.text(st.sampled_from("ab [/]\x1b\n\r\té한글漢…"), max_size=200)


def columns(line: str) -> int:
    text = _ESCAPE.sub("", line)
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def test_rows_show_state_step_and_last_line() -> None:
    rows = Rows("train.py")
    for rank in range(3):
        rows.started(rank, os.getpid())
    rows.progressed(0, Step(step=30, total=60, values={"loss": 0.25}))
    rows.wrote(0, b"\x1b[31mepoch 2\x1b[0m", 0.0)
    rows.crashed(1, "ValueError: my bug")
    rows.ended(2, ok=True)
    rows.wrote(2, b"too late", 0.0)
    lines = [_ESCAPE.sub("", line) for line in rows.draw(1e6, 100, 40)]
    assert "train.py" in lines[0]
    assert re.search(r"0  running  30/60 ━━━━╌╌╌╌ loss 0.25 .* MiB .*epoch 2$", lines[2])
    assert re.search(r"1  failed .*ValueError: my bug$", lines[3])
    assert re.search(r"2  ended ", lines[4])
    assert "too late" not in lines[4]
    assert rows.draw_at == 1e6 + REFRESH_S
    rows.started(1, os.getpid())  # in the failed one's place
    assert "1  running" in _ESCAPE.sub("", rows.draw(1e6, 100, 40)[3])


@given(
    last=_text,
    title=_text,
    width=st.integers(20, 200),
    count=st.integers(1, 40),
    height=st.integers(1, 60),
)
def test_table_fits_into_any_terminal(
    last: str, title: str, width: int, count: int, height: int
) -> None:
    text = plain(last.encode(errors="replace"))
    rows = [Row(rank, 1, last=text, step=Step(step=rank, total=50)) for rank in range(count)]
    lines = draw(plain(title.encode(errors="replace")), rows, 5.0, width, height)
    assert len(lines) <= max(5, height // 2 + 2)
    assert all(columns(line) <= width for line in lines)
    assert not any(c in line for line in lines for c in "\n\r\t")


def test_many_ranks_show_those_that_failed_or_are_behind() -> None:
    rows = [Row(rank, 1, step=Step(step=100 - rank)) for rank in range(50)]
    rows[7].state = "failed"
    text = "\n".join(draw("x", rows, 0.0, 80, 20))
    assert re.search(r"^ +7  \x1b\[31mfailed", text, re.MULTILINE)
    assert re.search(r"^ +49  running", text, re.MULTILINE)
    assert "43 ranks more" in text


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
def test_line_is_shown_without_what_controls_the_terminal(line: bytes, shown: str) -> None:
    assert plain(line) == shown
