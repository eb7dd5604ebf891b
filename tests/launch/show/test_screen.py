"""What ranks draw: bars that move over their rows, and the lines that they leave."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.launch.show.screen import SETTLE_S, Screen

RICH_REDRAW = b"\r\x1b[2K\x1b[1A\x1b[2K"


def screen_after(*parts: bytes) -> tuple[Screen, list[bytes]]:
    """Return a screen that was given bytes, and the lines that it returned."""
    screen, lines = Screen(0, "stderr"), list[bytes]()
    for part in parts:
        lines += screen.feed(part, 0.0)
    return screen, lines


@pytest.mark.parametrize(
    ("name", "parts", "lines", "rows"),
    [
        ("plain text", [b"one\ntwo"], [b"one"], []),
        ("windows lines", [b"one\r\ntwo\r\n"], [b"one\r", b"two\r"], []),
        ("a bar", [b"\r10%", b"\r20%", b"\r30%  "], [], [b"30%  "]),
        ("a bar behind a text", [b"load: ", b"\rload: 5%"], [], [b"load: 5%"]),
        ("a line printed above a bar", [b"\r10%\r   \rhello\n\r10%\r20%"], [b"hello"], [b"20%"]),
        (
            "tqdm's second bar",
            [b"\router 1", b"\n", b"\rinner 1", b"\x1b[A", b"\n\rinner 2\x1b[A", b"\router 2"],
            [],
            [b"outer 2", b"inner 2"],
        ),
        (
            "rich's bars",
            [b"\x1b[?25l", b"a 1\nb 1", RICH_REDRAW + b"a 2\nb 2", RICH_REDRAW + b"a 3\nb 3"],
            [],
            [b"a 3", b"b 3"],
        ),
        (
            "a line that rich prints above its bars",
            [b"\x1b[?25la 1\nb 1", RICH_REDRAW + b"hello\na 1\nb 1", RICH_REDRAW + b"a 2\nb 2"],
            [b"hello"],
            [b"a 2", b"b 2"],
        ),
        (
            "colors",
            [b"\r\x1b[31mred\x1b[0m", b"\r\x1b[32mgreen\x1b[0m"],
            [],
            [b"\x1b[32mgreen\x1b[0m"],
        ),
        ("a cut escape sequence", [b"\r10%\x1b", b"[2", b"K\r20%"], [], [b"20%"]),
        ("unknown movements", [b"\r10%\x1b[5;5Hx"], [], [b"10%x"]),
    ],
)
def test_rows_and_lines_of(
    name: str, parts: list[bytes], lines: list[bytes], rows: list[bytes]
) -> None:
    screen, got = screen_after(*parts)
    assert (got, screen.rows) == (lines, rows), name


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        ([b"\r50%", b"\r100%\n"], [b"100%"]),
        ([b"\x1b[?25la 1\nb 1\n", b"\x1b[?25h"], [b"a 1", b"b 1"]),
        ([b"\r50%", b"\r     \r"], []),  # a bar that was erased
    ],
)
def test_finished_rows_become_lines_when_the_cursor_does_not_return(
    parts: list[bytes], lines: list[bytes]
) -> None:
    screen, before = screen_after(*parts)
    assert (before, screen.holds, screen.show_at) == ([], True, SETTLE_S)
    assert screen.overdue() == (lines, b"")
    assert (screen.rows, screen.holds, screen.flush()) == ([], False, b"")
    assert screen.feed(b"next\n", 1.0) == [b"next"]


def test_rows_stay_while_the_cursor_is_hidden_and_end_with_the_output() -> None:
    screen, _ = screen_after(b"\x1b[?25la 1\nb 1\n")
    assert not screen.holds
    screen, _ = screen_after(b"\router\n\rinner\x1b[A")
    assert (screen.held, screen.flush(), screen.rows) == (b"inner", b"outer\ninner", [])


_PARTS = [
    *(b"\r", b"\n", b"\x1b[A", b"\x1b[99999999999B", b"\x1b[K", b"\x1b[J"),
    *(b"\x1b[?25l", b"\x1b[?25h", b"x", b"\x1b", b"\x1b[", b"[2"),
]


@given(st.lists(st.sampled_from(_PARTS), max_size=60))
def test_any_movements_keep_the_cursor_in_the_rows_and_few_of_them(parts: list[bytes]) -> None:
    screen, _ = screen_after(*parts)
    screen.overdue()
    assert len(screen.rows) <= 200
    screen.flush()
    assert not screen.holds
    assert screen.feed(b"plain\n", 0.0) == [b"plain"]
