"""What the ranks of one simulated communicator have launched, and whether that can end.

A *launch* is what one kernel of NCCL does: a collective, a message, or all that a group call has.
A rank starts its launches in order: each when the one before has ended, and when all work that it
waits for has run. A launch has *parts*; a part ends when others have *started* its counterparts:

    part                                   counterparts
    the n-th collective                    the n-th collective of every other rank
    the n-th send to rank q                rank q's n-th receive from this rank
    the n-th receive from rank q           rank q's n-th send to this rank

So a rank waits for all ranks whose counterparts are missing. *Ranks are deadlocked if they wait for
each other in a circle*, each in the last launch that it has started: a launch after it would start
only when it has ended. This is found by every rank of the circle from what it knows, which may be
old: a rank that had gone on had received what it waited for, from a rank of the circle that had
gone on before.

Counterparts of different kinds, or sizes, are an error too; NCCL would hang or corrupt memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

__all__ = ["Launch", "Launches", "Part"]

_Key = tuple[str, int, int]
"""Of a part: its kind, the other rank (-1: all), and its number among those."""


class Part(msgspec.Struct, frozen=True):
    """A collective or a message of a launch.

    Attributes:
        kind: "collective", "send" or "recv".
        peer: The other rank of a message; -1 for a collective.
        number: Among the rank's collectives, or its messages of this kind with `peer`.
        text: The operation in words, for errors.
        form: Must be equal in counterparts: operation, dtype, length.
        values: The bytes that it sends.
    """

    kind: str
    peer: int
    number: int
    text: str
    form: str
    values: bytes = b""

    @property
    def key(self) -> _Key:
        """Its place among the parts of its rank."""
        return self.kind, self.peer, self.number


class Launch(msgspec.Struct, frozen=True):
    """Parts that start together; none: the rank has left."""

    parts: list[Part]

    def __str__(self) -> str:
        return " with ".join(part.text for part in self.parts)


def counterpart(part: Part, rank: int) -> _Key:
    """Return the key that the counterpart of a part of `rank` has at another rank."""
    if part.kind == "collective":
        return part.key
    return "recv" if part.kind == "send" else "send", rank, part.number


class Launches:
    """The launches that ranks have started, as far as one rank knows.

    Args:
        size: Ranks of the communicator.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.gone: set[int] = set()
        self._last: dict[int, Launch] = {}
        self._parts: list[dict[_Key, Part]] = [{} for _ in range(size)]
        self._num_started: list[Counter[tuple[str, int]]] = [Counter() for _ in range(size)]

    def add(self, rank: int, launch: Launch) -> None:
        """Add the next launch of a rank."""
        if not launch.parts:
            self.gone.add(rank)
            return
        self._last[rank] = launch
        for part in launch.parts:
            self._parts[rank][part.key] = part
            self._num_started[rank][part.kind, part.peer] += 1

    def forget(self, rank: int, launch: Launch) -> None:
        """Drop the values of counterparts of a launch of `rank`, which has ended."""
        for peer, part in self._counterparts(rank, launch):
            self._parts[peer].pop(counterpart(part, rank), None)

    def has_started(self, rank: int, key: _Key) -> bool:
        """Return whether `rank` has started a part."""
        kind, peer, number = key
        return number < self._num_started[rank][kind, peer]

    def found(self, rank: int, part: Part) -> dict[int, Part]:
        """Return the counterparts of a part of `rank`, by rank, that were started."""
        found = {
            peer: self._parts[peer].get(counterpart(part, rank))
            for peer in self._peers_of(rank, part)
        }
        return {peer: other for peer, other in found.items() if other is not None}

    def missing(self, rank: int, launch: Launch) -> list[int]:
        """Return the ranks that have not started counterparts of a launch of `rank`."""
        return sorted(
            {
                peer
                for peer, part in self._counterparts(rank, launch)
                if not self.has_started(peer, counterpart(part, rank))
            }
        )

    def needs(self, rank: int) -> Iterator[_Key]:
        """Yield, by their keys, the parts of `rank` that other ranks wait for."""
        for peer, launch in self._last.items():
            for of, part in self._counterparts(peer, launch):
                key = counterpart(part, peer)
                if of == rank and not self.has_started(rank, key):
                    yield key

    def mismatched(self, rank: int, launch: Launch) -> dict[int, str]:
        """Return the texts of a part of `rank` and of one that does not fit, by rank, or none."""
        for part in launch.parts:
            for peer, other in self.found(rank, part).items():
                if other.form != part.form:
                    return {rank: part.text, peer: other.text}
        return {}

    def deadlocked(self, rank: int) -> dict[int, str]:
        """Return the launches of ranks that wait for each other, by rank, if `rank` waits for them.

        Empty: it is not known that they do.
        """
        waits = {each: self.missing(each, launch) for each, launch in self._last.items()}
        circle = _circle(waits, [rank], set())
        return {each: f"{self._last[each]} (waits for rank {peer})" for each, peer in circle}

    def _peers_of(self, rank: int, part: Part) -> Sequence[int]:
        if part.kind == "collective":
            return [peer for peer in range(self.size) if peer != rank]
        return [part.peer]

    def _counterparts(self, rank: int, launch: Launch) -> Iterator[tuple[int, Part]]:
        for part in launch.parts:
            for peer in self._peers_of(rank, part):
                yield peer, part


def _circle(waits: dict[int, list[int]], path: list[int], seen: set[int]) -> list[tuple[int, int]]:
    """Return who waits for whom in a circle that the last of `path` leads to."""
    seen.add(path[-1])
    for peer in waits.get(path[-1], ()):
        if peer in path:
            start = path.index(peer)
            return [*pairwise([*path[start:], peer])]
        if peer not in seen and (found := _circle(waits, [*path, peer], seen)):
            return found
    return []
