"""Which rows of other hosts a rank copies, where there are many hosts."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dure.parallel.fsdp.hosts import SharedByHost


def _numbered(count: int, number: int) -> SimpleNamespace:
    return SimpleNamespace(size=lambda: count, rank=lambda: number)


@pytest.mark.parametrize(
    ("place", "mine", "num_views", "expected"),
    [
        (0, 0, 1, {1: [12, 13, 14], 128: [30, 31, 32]}),
        (1, 200, 2, {0: [3, 4, 5], 254: [39, 40, 41]}),
        (2, 7, 3, {0: [6, 7, 8], 8: [102, 103, 104], 255: [54, 55]}),
        (3, 255, 1, {0: [9, 10, 11], 254: [45, 46, 47]}),
    ],
)
def test_rows_of_256_hosts_are_at_most_three_views(
    place: int, mine: int, num_views: int, expected: dict[int, list[int]]
) -> None:
    """Of 4 ranks each, with 3 bytes per rank; the last rank has none, the one before it two.

    Byte b is b modulo 251; host h and place p begin at byte 3 (4 h + p).
    """
    block = (torch.arange(3 * 1022 + 2) % 251).to(torch.uint8)
    strategy: Any = SharedByHost.__new__(SharedByHost)
    strategy._read = SimpleNamespace(bytes_of=lambda number: block)
    strategy._rooms, strategy._inter_node = [3], _numbered(256, mine)
    found = strategy._rows_of_others(0, _numbered(4, place))
    assert len(found) == num_views
    rows = {first + n: row.tolist() for first, each in found for n, row in enumerate(each)}
    assert {host: rows[host] for host in expected} == expected
    last = 255 if place < 3 else 254  # the last host's last rank has no rows
    assert sorted(rows) == [host for host in range(last + 1) if host != mine]
