"""Bytes copied past the cache, from files and memory: the same ones, and no more than there are."""

import os
import tempfile

import pytest

from dure import native
from dure.native import _absent

PIECE = 256 * 1024
DATA = bytes(i * i % 251 for i in range(1000)) * 1000


@pytest.fixture
def descriptor():
    with tempfile.TemporaryFile() as file:
        file.write(DATA)
        file.flush()
        yield file.fileno()


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, 100_003])
@pytest.mark.parametrize("count", [0, 1, 63, 4097, PIECE - 1, PIECE, 2 * PIECE + 5])
def test_bytes_of_a_file_and_their_sum(descriptor, at, count):
    to = bytearray(count + 2)
    inner = memoryview(to)[1:-1]  # at no aligned place
    assert native.copy_from_file(descriptor, at, inner, True) == (
        count,
        native.crc32c(DATA[at : at + count]),
    )
    assert to == b"\0" + DATA[at : at + count] + b"\0"
    assert native.copy_from_file(descriptor, at, inner, False) == (count, 0)


def test_beyond_the_end_nothing_is_copied_and_nothing_is_touched(descriptor):
    to = bytearray(2 * len(DATA))
    count, _ = native.copy_from_file(descriptor, 0, to, True)
    assert len(DATA) - PIECE < count <= len(DATA)
    assert to[:count] == DATA[:count]
    assert native.copy_from_file(descriptor, 4 * len(DATA), to, True) == (0, 0)


def test_what_cannot_be_mapped_is_left_to_read():
    reader, writer = os.pipe()
    try:
        assert native.copy_from_file(reader, 0, bytearray(10), True) == (0, 0)
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("module", [native, _absent], ids=["engine", "absent"])
def test_memory_is_copied(module):
    to = bytearray(len(DATA))
    module.copy_bytes(memoryview(to)[5:], memoryview(DATA)[:-5])
    assert to == bytes(5) + DATA[:-5]
    with pytest.raises(ValueError):
        module.copy_bytes(to, b"")
