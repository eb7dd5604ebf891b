"""Receives whose message has not come, in the order in which they were posted.

A receive may probe for its message if no earlier one that waits could take it. Of the same tag
these are, for a receive from one source, those from that source and those from any; for a receive
from any source, all. So there is a queue of numbers for each source and tag, and one for each tag.

Cost:
    Constant for each call, however many receives wait.

Threads:
    One at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import count

__all__ = ["Unmatched"]

_Queue = OrderedDict[int, None]  # its first number is found at once, also after removals


class Unmatched:
    """The receives of a group that wait for a message."""

    def __init__(self) -> None:
        self._numbers = count()
        self._by_source: dict[tuple[int | None, int], _Queue] = {}
        self._by_tag: dict[int, _Queue] = {}

    def add(self, src: int | None, tag: int) -> int:
        """Add a receive from `src` (None: any source), and return its number."""
        number = next(self._numbers)
        self._by_source.setdefault((src, tag), OrderedDict())[number] = None
        self._by_tag.setdefault(tag, OrderedDict())[number] = None
        return number

    def is_next(self, number: int, src: int | None, tag: int) -> bool:
        """Return whether no receive before this one could take its message."""
        if src is None:
            return number == next(iter(self._by_tag[tag]))
        from_any = self._by_source.get((None, tag))
        return number == next(iter(self._by_source[src, tag])) and (
            from_any is None or number < next(iter(from_any))
        )

    def remove(self, number: int, src: int | None, tag: int) -> None:
        """Remove a receive that got its message, or that waits no longer."""
        del self._by_source[src, tag][number]
        if not self._by_source[src, tag]:
            del self._by_source[src, tag]
        del self._by_tag[tag][number]
        if not self._by_tag[tag]:
            del self._by_tag[tag]
