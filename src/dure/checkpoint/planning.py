"""Deciding which rank writes what: each sends what it has, and computes the same division.

A slice of several ranks is written by one of them, so that all write about as many bytes: slices
    that only
one rank has is counted first, then the largest slice goes to the rank with the least so far, among
those that have it. The division contains the position of every slice in every file, so only
checksums are exchanged after writing.

The offers are usually the same in the next save. Then ranks send digests instead: each rank keeps
the divisions of the last few sets of digests, and all ranks of a group have seen the same ones. The
marks of tensors that several ranks may have are sent in each save, and compared (`replicas`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from msgspec.msgpack import encode

from dure.checkpoint.replicas import ALIKE, LOWEST, MARKED, different
from dure.checkpoint.slice_files import FileLayout, Slice, TensorKind
from dure.checkpoint.slices import Box, fault_of_cover
from dure.comm.group import ProcessGroup
from dure.errors import CheckpointMismatch

__all__ = ["Division", "Known", "Offer", "deal", "digest_of", "divide", "known_to", "marked_of"]

Offer = dict[str, tuple[TensorKind, tuple[Box, ...], int]]
"""What a rank has, by name: the kind, the boxes, and how it is handled (`replicas.handling`)."""

_NUM_KEPT = 8


def digest_of(offer: Offer) -> bytes:
    """Return a digest of an offer."""
    return hashlib.blake2b(encode(sorted(offer.items())), digest_size=16).digest()


def marked_of(offer: Offer) -> list[Slice]:
    """Return the slices of which a rank sends marks, in the order of the marks."""
    names = sorted(name for name, (_, _, how) in offer.items() if how & MARKED)
    return [Slice(name, box) for name in names for box in offer[name][1]]


@dataclass(frozen=True, slots=True)
class SharedSlices:
    """Slices with marks that several ranks have: for each, two ranks and the two marks' numbers."""

    slices: list[Slice]
    ranks: list[tuple[int, int]]
    first: np.ndarray[Any, Any]
    second: np.ndarray[Any, Any]
    must_equal: frozenset[str]
    """Names of tensors that must be equal."""

    @classmethod
    def of(cls, offers: list[Offer]) -> SharedSlices:
        """Find them in the offers of all ranks."""
        marked = [marked_of(offer) for offer in offers]
        begins = accumulate(map(len, marked), initial=0)
        first: dict[Slice, tuple[int, int]] = {}
        slices: list[Slice] = []
        ranks: list[tuple[int, int]] = []
        pairs: list[tuple[int, int]] = []
        for rank, (parts, begin) in enumerate(zip(marked, begins, strict=False)):
            for at, part in enumerate(parts, begin):
                lowest, its = first.setdefault(part, (rank, at))
                if lowest != rank:
                    slices.append(part)
                    ranks.append((lowest, rank))
                    pairs.append((its, at))
        numbers = np.array(pairs, np.int64).reshape(-1, 2)
        must_equal = {n for offer in offers for n, (_, _, how) in offer.items() if how & ALIKE}
        return cls(slices, ranks, numbers[:, 0], numbers[:, 1], frozenset(must_equal))

    def differing(self, marks: list[bytes]) -> frozenset[Slice]:
        """Compare the marks of all ranks; return the slices that differ and may differ.

        Raises:
            CheckpointMismatch: Slices differ that must be equal.
        """
        if not self.slices:
            return frozenset()
        every = np.frombuffer(b"".join(marks), np.uint32)
        found = np.flatnonzero(every[self.first] != every[self.second]).tolist()
        wrong: dict[str, str] = {}
        for number in found:
            name, (lower, higher) = self.slices[number].name, self.ranks[number]
            if name in self.must_equal:
                wrong.setdefault(name, f"{name} of rank {higher} differs from that of rank {lower}")
        if wrong:
            raise different(list(wrong.values()))
        return frozenset(self.slices[number] for number in found)


@dataclass(frozen=True, slots=True)
class Division:
    """What each rank writes."""

    kinds: dict[str, TensorKind]
    layouts: list[FileLayout]
    """Of each rank's file."""
    shared: SharedSlices


class Known:
    """Offers that all ranks of a group have seen.

    All ranks of the group ask and answer in the same order, so they know the same. For one thread.
    """

    def __init__(self) -> None:
        self._offers: OrderedDict[tuple[int, bytes], Offer] = OrderedDict()
        self._divisions: OrderedDict[tuple[Any, ...], Division] = OrderedDict()
        self.reported: set[str] = set()
        """Names that were logged, since ranks have different values of them."""

    def has(self, rank: int, digest: bytes) -> bool:
        """Return whether the other ranks have this offer of a rank, by its digest."""
        return (rank, digest) in self._offers

    def division(
        self,
        sent: list[tuple[bytes, Offer | None]],
        marks: list[bytes],
        unused: frozenset[str] = frozenset(),
    ) -> tuple[Division, frozenset[Slice]]:
        """Divide what ranks sent; also return the slices whose values differ between ranks.

        Args:
            sent: Digests, and the offers that are new.
            marks: For each rank, the marks of the slices that `marked_of` returns.
            unused: Names that are not saved.

        Raises:
            CheckpointMismatch: As `divide` and `SharedSlices.differing`.
        """
        offers: list[Offer] = []
        for rank, (digest, offer) in enumerate(sent):
            found = self._offers[rank, digest] if offer is None else offer
            self._offers[rank, digest] = found
            self._offers.move_to_end((rank, digest))
            offers.append(found)
        while len(self._offers) > _NUM_KEPT * len(sent):
            self._offers.popitem(last=False)
        digests = tuple(digest for digest, _ in sent)
        division = self._kept(digests, offers, frozenset(), unused)
        differing = division.shared.differing(marks)
        if differing:
            division = self._kept(digests, offers, differing, unused)
        return division, differing

    def _kept(
        self,
        digests: tuple[bytes, ...],
        offers: list[Offer],
        differing: frozenset[Slice],
        unused: frozenset[str],
    ) -> Division:
        key = digests, differing, unused
        if key not in self._divisions:
            self._divisions[key] = divide(offers, differing, unused)
        self._divisions.move_to_end(key)
        while len(self._divisions) > _NUM_KEPT:
            self._divisions.popitem(last=False)
        return self._divisions[key]


_known: WeakKeyDictionary[ProcessGroup, Known] = WeakKeyDictionary()


def known_to(group: ProcessGroup | None) -> Known:
    """Return what the ranks of a group know of each other."""
    return Known() if group is None else _known.setdefault(group, Known())


def divide(
    offers: list[Offer],
    differing: frozenset[Slice] = frozenset(),
    unused: frozenset[str] = frozenset(),
) -> Division:
    """Decide which rank writes what.

    Args:
        offers: Each rank's slices.
        differing: Slices whose values differ between ranks; the lowest rank writes them.
        unused: Names to leave out.

    Raises:
        CheckpointMismatch: Ranks have different tensors under one name, or not all of one.
    """
    kinds: dict[str, TensorKind] = {}
    holders: dict[Slice, list[int]] = {}
    wrong: dict[str, str] = {}
    lowest = set(differing)
    for rank, offer in enumerate(offers):
        for name, (kind, boxes, how) in offer.items():
            if name in unused:
                continue
            if kinds.setdefault(name, kind) != kind:
                wrong.setdefault(
                    name, f"{name} is {kind} on rank {rank}, {kinds[name]} on a lower rank"
                )
            for box in boxes:
                part = Slice(name, box)
                holders.setdefault(part, []).append(rank)
                if how & LOWEST:
                    lowest.add(part)
    if wrong:
        raise different(list(wrong.values()))
    _check_cover(kinds, holders)
    dealt = deal(holders, kinds, len(offers), lowest)
    layouts = [FileLayout.of(parts, kinds) for parts in dealt]
    return Division(kinds, layouts, SharedSlices.of(offers))


def deal(
    holders: dict[Slice, list[int]],
    kinds: dict[str, TensorKind],
    num_ranks: int,
    lowest: Collection[Slice] = (),
) -> list[list[Slice]]:
    """Deal slices out to ranks that have them, so that all get about as many bytes.

    What one rank alone has comes first, then the largest; each goes to the rank with the least.
    Those in `lowest` go to the lowest rank that has them.
    """
    sizes = {part: kinds[part.name].num_bytes(part.box) for part in holders}
    loads = [0] * num_ranks
    dealt: list[list[Slice]] = [[] for _ in loads]
    fixed = {part for part, ranks in holders.items() if len(ranks) == 1 or part in lowest}
    for part in sorted(holders, key=lambda p: (p not in fixed, -sizes[p], p)):
        ranks = holders[part]
        rank = min(ranks) if part in fixed else min(ranks, key=lambda r: (loads[r], r))
        loads[rank] += sizes[part]
        dealt[rank].append(part)
    return dealt


def _check_cover(kinds: dict[str, TensorKind], holders: dict[Slice, list[int]]) -> None:
    boxes: dict[str, list[Box]] = {name: [] for name in kinds}
    for part in holders:
        boxes[part.name].append(part.box)
    for name, kind in kinds.items():
        fault = fault_of_cover(kind.shape, boxes[name])
        if fault:
            raise CheckpointMismatch(
                "the ranks that save do not have each element of a tensor exactly once",
                seen=f"of {name!r}, {kind}, {fault}",
                fix="Save with all ranks of its mesh, and with one mesh for each name.",
            )
