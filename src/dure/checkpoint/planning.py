"""Deciding which rank writes what: rank 0 divides what all ranks have, and each learns its part.

A slice of several ranks is written by one of them, so that all write about as many bytes: slices
that only one rank has are counted first, then the largest slice goes to the rank with the least so
far, among those that have it.

A rank describes what it has in two parts (`described`): the *skeleton*, which has names, kinds and
how many boxes there are of each; and the boxes, as one row of numbers. In most programs all ranks
have one skeleton. Ranks with equal descriptions are a *class*: rank 0 asks one rank of a class for
its description, and compares and divides classes, in arrays. A *position* is the number of a box in
a description: rank 0 sends each rank the positions that it writes.

Rank 0 keeps the last few divisions, by the digests of the descriptions. In the next save, ranks
usually have what they had, and send digests only. The marks of tensors that several ranks may have
are sent in each save, and compared (`replicas`).

Cost:
    With n ranks of t tensors rank 0 takes O(n t log n) steps in arrays. The others take O(t). In
    the manifest, rank 0 describes the division in columns of runs (`runs`).
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from msgspec.msgpack import decode, encode

from dure.checkpoint.replicas import ALIKE, LOWEST, MARKED, different
from dure.checkpoint.runs import Runs, runs_of
from dure.checkpoint.slice_files import FileLayout, Slice, TensorKind
from dure.checkpoint.slices import Box, fault_of_boxes
from dure.comm.group import ProcessGroup
from dure.errors import CheckpointMismatch

__all__ = [
    "Description",
    "Division",
    "Known",
    "Offer",
    "Offers",
    "described",
    "known_to",
    "marked_of",
    "parts_of",
]

Array = np.ndarray[Any, Any]
Offer = dict[str, tuple[TensorKind, tuple[Box, ...], int]]
"""What a rank has, by name: the kind, the boxes, and how it is handled (`replicas.handling`)."""

_NUM_KEPT = 8


class Description(NamedTuple):
    """An offer, as it is sent; parts that rank 0 has, or gets from another rank, are empty."""

    skeleton: bytes
    boxes: bytes


def described(offer: Offer) -> Description:
    """Describe an offer."""
    rows: list[int] = []
    entries: list[Any] = []
    for name, (kind, boxes, how) in offer.items():
        entries.append((name, kind.dtype, kind.shape, how, len(boxes)))
        for box in boxes:
            rows += box.offsets
            rows += box.sizes
    return Description(encode(entries), np.array(rows, np.int64).tobytes())


def digest_of(data: bytes) -> bytes:
    """Return a digest of a part of a description."""
    return hashlib.blake2b(data, digest_size=16).digest()


def parts_of(offer: Offer) -> list[Slice]:
    """Return the slices of an offer by position."""
    return [Slice(name, box) for name, (_, boxes, _) in offer.items() for box in boxes]


def marked_of(offer: Offer) -> list[Slice]:
    """Return the slices of which a rank sends marks, in the order of the marks."""
    return [
        Slice(name, box) for name, (_, boxes, how) in offer.items() if how & MARKED for box in boxes
    ]


class _Rows(NamedTuple):
    """The boxes of one name in all descriptions; one item per class and box."""

    cls: Array
    position: Array
    mark: Array
    """The place among the marks of a rank; -1: it has none."""
    number: Array
    """Which of the distinct boxes it is."""


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """What all ranks have of one tensor."""

    name: str
    kind: TensorKind
    boxes: Array
    """[k, 2d]: the distinct boxes, offsets and sizes, in order."""
    rows: _Rows
    how: int
    """All handlings of it, as bits."""
    lowest: Array
    """[k]: whether the lowest rank writes it."""

    @property
    def num_bytes(self) -> Array:
        """[k]: bytes of each box."""
        sizes = self.boxes[:, len(self.kind.shape) :]
        return np.prod(sizes, axis=1, dtype=np.int64) * self.kind.torch_dtype.itemsize

    def box(self, number: int) -> Box:
        """Return one of the distinct boxes."""
        row, d = self.boxes[number].tolist(), len(self.kind.shape)
        return Box(tuple(row[:d]), tuple(row[d:]))


class Offers:
    """What all ranks have.

    Args:
        keys: For each rank, the digests of the two parts of its description.
        sent: Descriptions, one rank's of each class; a skeleton may be in one of them only.
    """

    def __init__(self, keys: Sequence[tuple[bytes, bytes]], sent: Sequence[Description]) -> None:
        skeletons = {k[0]: one.skeleton for k, one in zip(keys, sent, strict=True) if one.skeleton}
        boxes: dict[tuple[bytes, bytes], bytes] = {}
        members: dict[tuple[bytes, bytes], list[int]] = {}
        for rank, (key, one) in enumerate(zip(keys, sent, strict=True)):
            members.setdefault(key, []).append(rank)
            if key not in boxes or one.boxes:
                boxes[key] = one.boxes
        self.num_ranks = len(keys)
        self.members = [np.array(ranks) for ranks in members.values()]
        """The ranks of each class; classes are in the order of their lowest ranks."""
        self.class_of = np.empty(len(keys), np.int64)
        for number, ranks in enumerate(self.members):
            self.class_of[ranks] = number
        self.num_marks = np.zeros(len(self.members), np.int64)
        classes_of: dict[bytes, list[int]] = {}
        for number, (skeleton, _) in enumerate(members):
            classes_of.setdefault(skeleton, []).append(number)
        found: dict[str, list[tuple[Any, _Rows, Array]]] = {}
        numbers = list(members)
        for digest, classes in classes_of.items():
            rows = [np.frombuffer(boxes[numbers[c]], np.int64) for c in classes]
            self._add(skeletons[digest], np.array(classes), np.stack(rows), found)
        self._wrong: dict[str, str] = {}
        self.tensors = [self._tensor(name, items) for name, items in found.items()]

    def _add(
        self,
        skeleton: bytes,
        classes: Array,
        matrix: Array,
        found: dict[str, list[tuple[Any, _Rows, Array]]],
    ) -> None:
        """Add the classes of one skeleton to what was found of each name."""
        column = position = mark = 0
        for name, dtype, shape, how, count in decode(skeleton):
            width = 2 * len(shape)
            block = matrix[:, column : column + count * width]
            block = block.reshape(len(classes) * count, width)
            each = np.tile(np.arange(count), len(classes))
            marks = mark + each if how & MARKED else np.full(len(each), -1)
            rows = _Rows(np.repeat(classes, count), position + each, marks, each)
            kind = TensorKind(dtype, tuple(shape))
            found.setdefault(name, []).append(((kind, how, int(classes[0])), rows, block))
            column, position = column + count * width, position + count
            mark += count if how & MARKED else 0
        self.num_marks[classes] = mark

    def _tensor(self, name: str, items: list[tuple[Any, _Rows, Array]]) -> _SavedTensor:
        (kind, _, _), how, lowest = items[0][0], 0, list[Array]()
        for (other, one, cls), rows, _ in items:
            if other != kind and name not in self._wrong:
                rank = self.members[cls][0]
                self._wrong[name] = f"{name} is {other} on rank {rank}, {kind} on a lower rank"
            how |= one
            lowest.append(np.full(len(rows.cls), bool(one & LOWEST)))
        if name in self._wrong:
            none = np.empty(0, np.int64)
            return _SavedTensor(name, kind, none.reshape(0, 0), _Rows(*[none] * 4), how, none)
        block = np.concatenate([block for _, _, block in items])
        cls, position, mark, _ = map(np.concatenate, zip(*(r for _, r, _ in items), strict=True))
        if len(items) > 1:
            order = np.argsort(cls, kind="stable")
            block, cls, position, mark = block[order], cls[order], position[order], mark[order]
            is_lowest = np.concatenate(lowest)[order]
        else:
            is_lowest = lowest[0]
        boxes, number = _distinct(block)
        lowest_of = np.zeros(len(boxes), bool)
        lowest_of[number[is_lowest]] = True
        rows = _Rows(cls, position, mark, number)
        return _SavedTensor(name, kind, boxes, rows, how, lowest_of)

    def differing(self, marks: Sequence[bytes]) -> frozenset[Slice]:
        """Compare the marks of all ranks; return the slices that differ and may differ.

        Args:
            marks: For each rank, the marks of the slices that `marked_of` returns.

        Raises:
            CheckpointMismatch: Slices differ that must be equal.
        """
        rows = [
            np.frombuffer(b"".join([marks[r] for r in ranks]), np.uint32).reshape(len(ranks), -1)
            for ranks in self.members
        ]
        begins = np.cumsum(self.num_marks) - self.num_marks
        firsts = np.concatenate([every[0] for every in rows])
        unequal = np.zeros(len(firsts), bool)
        for begin, every in zip(begins, rows, strict=True):
            unequal[begin : begin + every.shape[1]] = (every != every[0]).any(0)
        found: set[Slice] = set()
        wrong: dict[str, str] = {}
        for tensor in self.tensors:
            cls, _, mark, number = tensor.rows
            marked = np.flatnonzero(mark >= 0)
            places = begins[cls[marked]] + mark[marked]
            numbers, first = np.unique(number[marked], return_index=True)
            reference = np.zeros(len(tensor.boxes), np.uint32)
            reference[numbers] = firsts[places[first]]
            lowest = dict(zip(numbers.tolist(), cls[marked[first]].tolist(), strict=True))
            differs = (firsts[places] != reference[number[marked]]) | unequal[places]
            for at in np.flatnonzero(differs).tolist():
                row = marked[at]
                found.add(Slice(tensor.name, tensor.box(int(number[row]))))
                if tensor.how & ALIKE:
                    every = rows[cls[row]][:, mark[row]]
                    other = np.flatnonzero(every != reference[number[row]])[0]
                    low = self.members[lowest[int(number[row])]][0]
                    high = self.members[cls[row]][other]
                    text = f"{tensor.name} of rank {high} differs from that of rank {low}"
                    wrong[tensor.name] = text
                    break
        if wrong:
            raise different([wrong[name] for name in sorted(wrong)])
        return frozenset(found)

    def divided(
        self, differing: frozenset[Slice] = frozenset(), unused: frozenset[str] = frozenset()
    ) -> Division:
        """Decide which rank writes what.

        Args:
            differing: Slices whose values differ between ranks; the lowest rank writes them.
            unused: Names to leave out.

        Raises:
            CheckpointMismatch: Ranks have different tensors under one name, or not all of one.
        """
        wrong = [text for name, text in self._wrong.items() if name not in unused]
        if wrong:
            raise different(wrong)
        tensors = [tensor for tensor in self.tensors if tensor.name not in unused]
        _check_cover(tensors)
        return Division(self, tensors, self._dealt(tensors, differing))

    def _dealt(self, tensors: list[_SavedTensor], differing: frozenset[Slice]) -> list[Array]:
        """Return which rank writes each distinct box, so that all get about as many bytes.

        What one rank alone has comes first, then the largest; each goes to the rank with the least.
        """
        loads = np.zeros(self.num_ranks, np.int64)
        sizes = np.array([len(ranks) for ranks in self.members], np.int64)
        lowest_rank = np.array([ranks[0] for ranks in self.members], np.int64)
        names = {part.name for part in differing}
        writers: list[Array] = []
        others: list[tuple[int, str, int, int]] = []
        for at, tensor in enumerate(tensors):
            cls, number, count = tensor.rows.cls, tensor.rows.number, len(tensor.boxes)
            writer = np.full(count, self.num_ranks, np.int64)
            np.minimum.at(writer, number, lowest_rank[cls])
            fixed = tensor.lowest | (np.bincount(number, sizes[cls], count) == 1)
            if tensor.name in names:
                fixed |= [Slice(tensor.name, tensor.box(k)) in differing for k in range(count)]
            num_bytes = tensor.num_bytes
            np.add.at(loads, writer[fixed], num_bytes[fixed])
            writers.append(writer)
            for k in np.flatnonzero(~fixed).tolist():
                others.append((-int(num_bytes[k]), tensor.name, k, at))
        holders = _Holders(self.members)
        for negative, _, k, at in sorted(others):
            ranks = holders.of(tensors[at], k)
            rank = ranks[loads[ranks].argmin()]
            loads[rank] -= negative
            writers[at][k] = rank
        return writers


class _Holders:
    """The ranks that have a slice, ascending."""

    def __init__(self, members: list[Array]) -> None:
        self._members = members
        self._ranks: dict[bytes, Array] = {}
        self._of: dict[str, list[Array]] = {}

    def of(self, tensor: _SavedTensor, number: int) -> Array:
        """Return the ranks that have one of the distinct boxes."""
        if tensor.name not in self._of:
            order = np.argsort(tensor.rows.number, kind="stable")
            ends = np.cumsum(np.bincount(tensor.rows.number))[:-1]
            self._of[tensor.name] = np.split(tensor.rows.cls[order], ends)
        classes = self._of[tensor.name][number]
        key = classes.tobytes()
        if key not in self._ranks:
            self._ranks[key] = np.sort(np.concatenate([self._members[c] for c in classes.tolist()]))
        return self._ranks[key]


def _distinct(block: Array) -> tuple[Array, Array]:
    """Return the distinct rows in order, and for each row which of them it is."""
    varying = np.flatnonzero((block != block[:1]).any(0))
    if not len(varying):
        return block[:1], np.zeros(len(block), np.int64)
    if len(varying) == 1:  # sorting rows takes ten times as long
        _, first, number = np.unique(block[:, varying[0]], return_index=True, return_inverse=True)
        return block[first], number.reshape(-1)
    boxes, number = np.unique(block, axis=0, return_inverse=True)
    return boxes, number.reshape(-1)


class Division:
    """What each rank writes.

    Args:
        offers: The offers of all ranks.
        tensors: Those that are saved.
        writers: For each of them, the rank that writes each distinct box.
    """

    def __init__(self, offers: Offers, tensors: list[_SavedTensor], writers: list[Array]) -> None:
        self._tensors, self._writers = tensors, writers
        ranks, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for tensor, writer in zip(tensors, writers, strict=True):
            cls, position, _, number = tensor.rows
            chosen = np.flatnonzero(offers.class_of[writer][number] == cls)
            ranks.append(writer[number[chosen]])
            positions.append(position[chosen])
        every, position = np.concatenate(ranks), np.concatenate(positions)
        order = np.lexsort((position, every))
        ends = np.cumsum(np.bincount(every, minlength=offers.num_ranks))[:-1]
        self.positions = np.split(position[order], ends)
        """For each rank, the positions that it writes, ascending."""

    @property
    def kinds(self) -> dict[str, TensorKind]:
        """What is saved, by name."""
        return {tensor.name: tensor.kind for tensor in self._tensors}

    def parts(self) -> list[list[Slice]]:
        """Return what each rank writes, in the order of its file."""
        found: list[list[Slice]] = [[] for _ in self.positions]
        for tensor, writer in zip(self._tensors, self._writers, strict=True):
            for number, rank in enumerate(writer.tolist()):
                found[rank].append(Slice(tensor.name, tensor.box(number)))
        kinds = self.kinds
        return [list(FileLayout.of(parts, kinds).begins) for parts in found]

    @cached_property
    def text(self) -> str:
        """The tensors as a manifest has them, as JSON; the same for each save of this division."""
        # Slices are in a file in the order of `slice_files.FileLayout`: boxes are sorted already.
        tensors = sorted(
            zip(self._tensors, self._writers, strict=True),
            key=lambda one: (-one[0].kind.torch_dtype.itemsize, one[0].name),
        )
        counts = np.array([len(writer) for _, writer in tensors], np.int64)
        writers = np.concatenate([np.empty(0, np.int64), *(writer for _, writer in tensors)])
        sizes = np.concatenate([np.empty(0, np.int64), *(t.num_bytes for t, _ in tensors)])
        begins, places = _in_files(writers, sizes)
        is_writing = np.bincount(writers, minlength=len(self.positions)) > 0
        files = (np.cumsum(is_writing) - 1)[writers]
        known: dict[Any, tuple[list[Runs], list[Runs]]] = {}
        found: dict[str, Any] = {}
        ends = np.cumsum(counts)
        for (tensor, _), begin, end in zip(tensors, ends - counts, ends, strict=True):
            (dtype, shape), boxes = tensor.kind, tensor.boxes
            key = boxes.tobytes(), len(shape)
            if key not in known:
                columns = [runs_of(column) for column in boxes.T] or [[]] * (2 * len(shape))
                known[key] = columns[: len(shape)], columns[len(shape) :]
            offsets, box_sizes = known[key]
            found[tensor.name] = {
                "dtype": dtype,
                "shape": shape,
                "offsets": offsets,
                "sizes": box_sizes,
                "files": runs_of(files[begin:end]),
                "begins": runs_of(begins[begin:end]),
                "places": runs_of(places[begin:end]),
            }
        return json.dumps({tensor.name: found[tensor.name] for tensor in self._tensors})


def _in_files(writers: Array, sizes: Array) -> tuple[Array, Array]:
    """Return where slices begin in the files of their writers, and which of their slices they are.

    Args:
        writers: The rank that writes each slice; slices of a rank are in the order of its file.
        sizes: Bytes of each slice.
    """
    order = np.argsort(writers, kind="stable")
    sorted_writers, sorted_sizes = writers[order], sizes[order]
    ends = np.cumsum(sorted_sizes)
    first = np.searchsorted(sorted_writers, sorted_writers)  # of the same writer
    begins, places = np.empty_like(writers), np.empty_like(writers)
    begins[order] = ends - sorted_sizes - (ends - sorted_sizes)[first]
    places[order] = np.arange(len(writers)) - first
    return begins, places


class Known:
    """What rank 0 of a group knows of the saves before. For one thread."""

    def __init__(self) -> None:
        self._offers: OrderedDict[tuple[Any, ...], Offers] = OrderedDict()
        self._divisions: OrderedDict[tuple[Any, ...], Division] = OrderedDict()
        self.reported: set[str] = set()
        """Names that were logged, since ranks have different values of them."""

    def lacks(self, keys: Sequence[tuple[bytes, bytes]]) -> list[tuple[bool, bool]]:
        """Return which parts of its description each rank must send, given their digests."""
        if tuple(keys) in self._offers:
            return [(False, False)] * len(keys)
        skeletons, boxes = set[bytes](), set[tuple[bytes, bytes]]()
        found: list[tuple[bool, bool]] = []
        for key in keys:
            found.append((key[0] not in skeletons, key not in boxes))
            skeletons.add(key[0])
            boxes.add(key)
        return found

    def division(
        self,
        keys: Sequence[tuple[bytes, bytes]],
        sent: Sequence[Description],
        marks: Sequence[bytes],
        unused: frozenset[str] = frozenset(),
    ) -> tuple[Division, frozenset[Slice]]:
        """Divide what ranks have; also return the slices whose values differ between ranks.

        Args:
            keys: For each rank, the digests of its description.
            sent: For each rank, what `lacks` asked for.
            marks: For each rank, the marks of the slices that `marked_of` returns.
            unused: Names that are not saved.

        Raises:
            CheckpointMismatch: As `Offers.divided` and `Offers.differing`.
        """
        key = tuple(keys)
        if key not in self._offers:
            self._offers[key] = Offers(keys, sent)
        _keep_last(self._offers, key)
        offers = self._offers[key]
        self._kept(key, offers, frozenset(), unused)  # names what is missing before what differs
        differing = offers.differing(marks)
        return self._kept(key, offers, differing, unused), differing

    def _kept(
        self, key: Any, offers: Offers, differing: frozenset[Slice], unused: frozenset[str]
    ) -> Division:
        full_key = key, differing, unused
        if full_key not in self._divisions:
            self._divisions[full_key] = offers.divided(differing, unused)
        _keep_last(self._divisions, full_key)
        return self._divisions[full_key]


def _keep_last(kept: OrderedDict[Any, Any], key: Any) -> None:
    kept.move_to_end(key)
    while len(kept) > _NUM_KEPT:
        kept.popitem(last=False)


_known: WeakKeyDictionary[ProcessGroup, Known] = WeakKeyDictionary()


def known_to(group: ProcessGroup | None) -> Known:
    """Return what rank 0 of a group knows of the saves before."""
    return Known() if group is None else _known.setdefault(group, Known())


def _check_cover(tensors: list[_SavedTensor]) -> None:
    faults: dict[tuple[Any, bytes], str | None] = {}
    for tensor in tensors:
        shape = tensor.kind.shape
        key = shape, tensor.boxes.tobytes()
        if key not in faults:
            faults[key] = fault_of_boxes(shape, tensor.boxes)
        if faults[key]:
            raise CheckpointMismatch(
                "the ranks that save do not have each element of a tensor exactly once",
                seen=f"of {tensor.name!r}, {tensor.kind}, {faults[key]}",
                fix="Save with all ranks of its mesh, and with one mesh for each name.",
            )
