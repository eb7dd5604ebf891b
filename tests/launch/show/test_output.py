"""Lines of several ranks on one sink."""

import errno
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.launch.show.output import IDLE_S, PATIENCE_S, LineReader, Sink, same_file


@given(parts=st.lists(st.sampled_from([b"a", b"b\r", b"\xff", b"\n", b"x\ny"]), max_size=40))
def test_reader_gives_back_what_it_took_however_it_is_cut(parts: list[bytes]) -> None:
    reader = LineReader(0, "stdout")
    lines = [line for part in parts for line in reader.feed(part, 0.0)]
    assert b"".join(line + b"\n" for line in lines) + reader.flush() == b"".join(parts)
    assert not reader.holds


def test_reader_shows_a_prompt_when_idle_and_a_progress_bar_that_never_is() -> None:
    prompt, bar = LineReader(0, "stdout"), LineReader(0, "stderr")
    for i in range(20):
        prompt.feed(b"x", i / 10)
        bar.feed(b"\r10%", i / 10)
    assert prompt.show_at == pytest.approx(1.9 + IDLE_S)
    assert bar.show_at == pytest.approx(PATIENCE_S)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def test_unfinished_line_is_continued_by_its_owner_and_ended_by_another(
    pipe: tuple[int, int],
) -> None:
    sink = Sink(pipe[1])
    sink.put_part("a", b"[0] ", b"one ")
    sink.put("a", b"[0] ", [b"line"])
    sink.put_part("a", b"[0] ", b"one")
    sink.put("b", b"[1] ", [b"two"])
    sink.put_part("a", b"[0] ", b" more")
    sink.say("done")
    sink.write_some()
    assert os.read(pipe[0], 100) == b"[0] one line\n[0] one\n[1] two\n[0]  more\ndone\n"


def test_sink_never_waits_and_says_when_it_is_full(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1])
    while not sink.full:
        sink.put("a", b"[0] ", [b"x" * 100_000])
        sink.write_some()
    taken = 0
    while sink.waiting:
        taken += len(os.read(pipe[0], 1 << 16))
        sink.write_some()
    assert taken > 0
    assert not sink.full


@pytest.mark.parametrize("code", [errno.EPIPE, errno.ENOSPC])
def test_sink_that_cannot_write_says_why(code: int) -> None:
    read, write = os.pipe()
    os.close(read)
    fd = write if code == errno.EPIPE else os.open("/dev/full", os.O_WRONLY)
    sink = Sink(fd)
    sink.say("lost")
    sink.write_some()
    assert sink.broken and not sink.waiting
    assert sink.trouble is not None and sink.trouble.errno == code
    assert same_file(fd, fd) and same_file(fd, write) == (code == errno.EPIPE)
    for open_fd in {fd, write}:
        os.close(open_fd)
    assert Sink(write).broken  # a descriptor that is closed


def test_bars_on_a_terminal_that_was_closed_are_not_waited_for() -> None:
    read, write = os.pipe()
    sink = Sink(write)
    sink.put_area([b"10 %"])
    sink.write_some()
    os.close(read)
    sink.put_area([b"20 %"])
    sink.write_some()
    assert sink.broken
    sink.put_area([])
    sink.write_some()
    assert not sink.waiting
    os.close(write)


def test_area_stays_below_what_is_written(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1])
    sink.put_part("a", b"[0] ", b"Name? ")
    sink.put_area([b"one", b"two"])
    sink.write_some()
    sink.put("b", b"[1] ", [b"line"])
    sink.write_some()
    sink.put_area([])
    sink.put("a", b"[0] ", [b"Dure"])
    sink.write_some()
    area = b"\x1b[?7lone\x1b[0m\ntwo\x1b[0m\n\x1b[?7h"  # without wrapping
    erase = b"\x1b[2F\x1b[J"
    shown = b"[0] Name? \n" + area + erase + b"[1] line\n" + area + erase + b"[0] Dure\n"
    assert os.read(pipe[0], 1000) == shown
