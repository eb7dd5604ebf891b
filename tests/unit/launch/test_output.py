"""Lines of several ranks on one sink."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.launch.show.folding import rank_set
from dure.launch.show.output import IDLE_S, PATIENCE_S, LineReader, Sink, same_file
from dure.launch.show.prefixes import Prefixes


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_reader_gives_back_what_it_took_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    reader = LineReader(0, "stdout")
    edges = [0, *sorted(cuts), len(data)]
    lines: list[bytes] = []
    for start, end in itertools.pairwise(edges):
        lines += reader.feed(data[start:end], 0.0)
    assert b"".join(line + b"\n" for line in lines) + reader.flush() == data
    assert not reader.holds


def test_reader_holds_an_unfinished_line() -> None:
    reader = LineReader(0, "stdout")
    assert reader.feed(b"one\ntw", 1.0) == [b"one"]
    assert reader.holds
    assert reader.feed(b"o\n", 2.0) == [b"two"]
    assert not reader.holds


def test_reader_shows_a_prompt_when_idle_and_a_progress_bar_that_never_is() -> None:
    prompt, bar = LineReader(0, "stdout"), LineReader(0, "stderr")
    for i in range(20):
        prompt.feed(b"x", i / 10)
        bar.feed(b"\r10%", i / 10)
    assert prompt.show_at == pytest.approx(1.9 + IDLE_S)
    assert bar.show_at == pytest.approx(PATIENCE_S)


def test_prefixes_are_padded_and_coloured() -> None:
    assert Prefixes(0, 2).of(0b10, colour=False) == b"[1] "
    assert Prefixes(0, 11).of(1 << 3, colour=False) == b"[ 3] "
    assert Prefixes(0, 1).of(1, colour=True) == b"\x1b[36m[0] \x1b[0m"
    assert Prefixes(0, 1, shown=False).of(1, colour=True) == b""


def test_prefix_of_several_ranks_is_a_node_set_of_global_ranks() -> None:
    assert Prefixes(0, 11).of(0b100111, colour=False) == b"[0-2,5] "
    assert Prefixes(8, 16, host="node7.cluster").of(0b111, colour=False) == b"[node7:8-10] "
    assert rank_set([4, 3, 1]) == "1,3-4"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def test_unfinished_line_is_continued_by_its_owner(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1])
    sink.put_part("a", b"[0] ", b"one ")
    sink.put("a", b"[0] ", [b"line"])
    sink.write_some()
    assert os.read(pipe[0], 100) == b"[0] one line\n"


def test_unfinished_line_is_ended_by_another_owner(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1])
    sink.put_part("a", b"[0] ", b"one")
    sink.put("b", b"[1] ", [b"two"])
    sink.put_part("a", b"[0] ", b" more")
    sink.say("done")
    sink.write_some()
    assert os.read(pipe[0], 100) == b"[0] one\n[1] two\n[0]  more\ndone\n"


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


def test_sink_without_reader_is_broken() -> None:
    read, write = os.pipe()
    os.close(read)
    sink = Sink(write)
    sink.say("hello")
    sink.write_some()
    assert sink.broken
    assert not sink.waiting
    os.close(write)


def test_closed_descriptor_is_broken() -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    assert Sink(write).broken


def test_same_file_tells_copies_from_strangers(pipe: tuple[int, int]) -> None:
    copy = os.dup(pipe[0])
    assert same_file(pipe[0], copy)
    os.close(copy)
    assert not same_file(copy, pipe[0])


def test_sink_that_cannot_write_says_why() -> None:
    with open("/dev/full", "wb") as full:
        sink = Sink(full.fileno())
        sink.say("lost")
        sink.write_some()
    assert sink.broken
    assert sink.trouble is not None
    assert sink.trouble.errno == errno.ENOSPC
