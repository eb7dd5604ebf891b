"""Lines of several ranks on one sink."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.launch.output import LineReader, Piece, Sink, prefixes, same_file


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_reader_gives_back_what_it_took_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    reader = LineReader(0, "stdout")
    edges = [0, *sorted(cuts), len(data)]
    pieces: list[Piece] = []
    for start, end in itertools.pairwise(edges):
        pieces += reader.feed(data[start:end], 0.0)
    assert all(piece.ends for piece in pieces)
    pieces += reader.flush()
    assert b"".join(piece.text + b"\n" * piece.ends for piece in pieces) == data


def test_reader_holds_an_unfinished_line() -> None:
    reader = LineReader(0, "stdout")
    assert reader.feed(b"one\ntw", 1.0) == [Piece(b"one", ends=True)]
    assert reader.holds
    assert reader.feed(b"o\n", 2.0) == [Piece(b"two", ends=True)]
    assert not reader.holds


def test_prefixes_are_padded_and_coloured() -> None:
    assert prefixes(2, colour=False) == [b"[0] ", b"[1] "]
    assert prefixes(11, colour=False)[3] == b"[ 3] "
    assert prefixes(1, colour=True) == [b"\x1b[36m[0] \x1b[0m"]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def test_unfinished_line_is_continued_by_its_owner(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1], 2)
    sink.put("a", 0, [Piece(b"one ", ends=False)])
    sink.put("a", 0, [Piece(b"line", ends=True)])
    sink.write_some()
    assert os.read(pipe[0], 100) == b"[0] one line\n"


def test_unfinished_line_is_ended_by_another_owner(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1], 2)
    sink.put("a", 0, [Piece(b"one", ends=False)])
    sink.put("b", 1, [Piece(b"two", ends=True)])
    sink.put("a", 0, [Piece(b" more", ends=False)])
    sink.say("done")
    sink.write_some()
    assert os.read(pipe[0], 100) == b"[0] one\n[1] two\n[0]  more\ndone\n"


def test_sink_never_waits_and_says_when_it_is_full(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1], 1)
    while not sink.full:
        sink.put("a", 0, [Piece(b"x" * 100_000, ends=True)])
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
    sink = Sink(write, 1)
    sink.say("hello")
    sink.write_some()
    assert sink.broken
    assert not sink.waiting
    os.close(write)


def test_closed_descriptor_is_broken() -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    assert Sink(write, 1).broken


def test_same_file_tells_copies_from_strangers(pipe: tuple[int, int]) -> None:
    copy = os.dup(pipe[0])
    assert same_file(pipe[0], copy)
    os.close(copy)
    assert not same_file(copy, pipe[0])
