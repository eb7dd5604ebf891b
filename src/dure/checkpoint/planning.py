"""Who writes what: every rank tells what it has, and each works out the same division.

What several ranks have is written by one of them, so that all write about as many bytes: what
one rank alone has is counted first, then the largest goes to the rank with the least so far, of
those that have it. The division says where every slice lies in every file, so what ranks still have
to tell after writing is the slices' checksums.

From save to save the offers are the same. Then a rank sends a digest instead: each rank keeps the
divisions of the last few sets of digests, and those of a group saw the same ones.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from dure.checkpoint.slice_files import Kind, Layout, Slice
from dure.checkpoint.slices import Box, fault_of_cover
from dure.comm.group import ProcessGroup
from dure.errors import CheckpointMismatch

__all__ = ["Division", "Known", "Offer", "deal", "digest_of", "divide", "known_to"]

Offer = dict[str, tuple[Kind, tuple[Box, ...]]]
"""What a rank has, by name."""

_NUM_KEPT = 8


def digest_of(offer: Offer) -> bytes:
    """Return what tells offers apart."""
    return hashlib.blake2b(repr(sorted(offer.items())).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Division:
    """What each rank writes."""

    kinds: dict[str, Kind]
    layouts: list[Layout]
    """Of each rank's file."""


class Known:
    """Offers that all ranks of a group have seen.

    All ranks of the group ask and tell in the same order, so they know the same. For one thread.
    """

    def __init__(self) -> None:
        self._offers: OrderedDict[tuple[int, bytes], Offer] = OrderedDict()
        self._divisions: OrderedDict[tuple[bytes, ...], Division] = OrderedDict()

    def has(self, rank: int, digest: bytes) -> bool:
        """Tell whether the others know this offer of a rank by its digest."""
        return (rank, digest) in self._offers

    def division(self, told: list[tuple[bytes, Offer | None]]) -> Division:
        """Divide what ranks told: digests, and offers where they are new. Errors as `divide`."""
        offers: list[Offer] = []
        for rank, (digest, offer) in enumerate(told):
            found = self._offers[rank, digest] if offer is None else offer
            self._offers[rank, digest] = found
            self._offers.move_to_end((rank, digest))
            offers.append(found)
        while len(self._offers) > _NUM_KEPT * len(told):
            self._offers.popitem(last=False)
        key = tuple(digest for digest, _ in told)
        if key not in self._divisions:
            self._divisions[key] = divide(offers)
        self._divisions.move_to_end(key)
        while len(self._divisions) > _NUM_KEPT:
            self._divisions.popitem(last=False)
        return self._divisions[key]


_known: WeakKeyDictionary[ProcessGroup, Known] = WeakKeyDictionary()


def known_to(group: ProcessGroup | None) -> Known:
    """Return what the ranks of a group know of each other."""
    return Known() if group is None else _known.setdefault(group, Known())


def divide(offers: list[Offer]) -> Division:
    """Decide which rank writes what.

    Raises:
        CheckpointMismatch: Ranks have different tensors under one name, or not all of one.
    """
    kinds: dict[str, Kind] = {}
    holders: dict[Slice, list[int]] = {}
    for rank, offer in enumerate(offers):
        for name, (kind, boxes) in offer.items():
            if kinds.setdefault(name, kind) != kind:
                raise CheckpointMismatch(
                    "ranks have different tensors under one name",
                    seen=f"{name!r} is {kind} on rank {rank}, {kinds[name]} on one before",
                    fix="Give a tensor that each rank has its own of a name with the rank in it.",
                )
            for box in boxes:
                holders.setdefault(Slice(name, box), []).append(rank)
    _check_cover(kinds, holders)
    return Division(kinds, [Layout.of(parts, kinds) for parts in deal(holders, kinds, len(offers))])


def deal(
    holders: dict[Slice, list[int]], kinds: dict[str, Kind], num_ranks: int
) -> list[list[Slice]]:
    """Deal slices out to ranks that have them, so that all get about as many bytes.

    What one rank alone has comes first, then the largest; each goes to the rank with the least.
    """
    sizes = {part: kinds[part.name].num_bytes(part.box) for part in holders}
    loads = [0] * num_ranks
    dealt: list[list[Slice]] = [[] for _ in loads]
    for part in sorted(holders, key=lambda p: (len(holders[p]) > 1, -sizes[p], p)):
        rank = min(holders[part], key=lambda r: (loads[r], r))
        loads[rank] += sizes[part]
        dealt[rank].append(part)
    return dealt


def _check_cover(kinds: dict[str, Kind], holders: dict[Slice, list[int]]) -> None:
    boxes: dict[str, list[Box]] = {name: [] for name in kinds}
    for part in holders:
        boxes[part.name].append(part.box)
    for name, kind in kinds.items():
        fault = fault_of_cover(kind.shape, boxes[name])
        if fault:
            raise CheckpointMismatch(
                "the ranks that save do not have the whole of a tensor, once each element",
                seen=f"of {name!r}, {kind}, {fault}",
                fix="Save with all ranks of its mesh, and with one mesh for each name.",
            )
