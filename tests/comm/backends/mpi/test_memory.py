"""How the mpi backend cuts memory into shares and messages."""

from __future__ import annotations

import pytest

from dure.comm.backends.mpi import memory as mpi_memory


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 1000])
def test_shares_cover_the_whole_in_elements(n, width, count):
    pieces = mpi_memory.shares((640, count * width), n, width)
    assert [begin for begin, _ in pieces] == [
        640 + sum(nbytes for _, nbytes in pieces[:i]) for i in range(n)
    ]
    assert sum(nbytes for _, nbytes in pieces) == count * width
    assert all(nbytes % width == 0 for _, nbytes in pieces)
    assert max(nbytes for _, nbytes in pieces) - min(nbytes for _, nbytes in pieces) <= width


def test_messages_of_a_piece_are_no_longer_than_mpi_can_count(monkeypatch):
    monkeypatch.setattr(mpi_memory, "_LONGEST", 10)
    assert list(mpi_memory.messages((0, 25), 0)) == [(0, 10), (10, 10), (20, 5)]
    assert list(mpi_memory.messages((0, 25), 25)) == []
    assert list(mpi_memory.messages((0, 0), 0)) == []
    assert list(mpi_memory.messages((0, 0), -1)) == [(0, 0)]
