"""Boxes of a full tensor's elements: those of a rank, and those of a file.

A box is an offset and a size for each dimension. A rank of a mesh has one box, or, where a
`StridedShard` cuts runs, several. Where ranks are replicas of each other they have equal boxes.
Boxes without elements are left out everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, sub
from typing import Any, NamedTuple

import numpy as np
import torch

from dure.checkpoint.tree import require_dense
from dure.errors import UsageError
from dure.tensor import DTensor
from dure.tensor.placement_types import Placement
from dure.tensor.spec import cuts_of, runs_of

__all__ = ["Box", "Piece", "fault_of_boxes", "fault_of_cover", "full_box", "pieces_of"]

Array = np.ndarray[Any, Any]
_LARGEST = 1 << 62
"""Of an offset or a size: sums of two of them are numbers of 64 bits."""
_MOST_PAIRS = 1 << 28  # some seconds
_PAIRS_AT_ONCE = 1 << 16


class Box(NamedTuple):
    """Some elements of a full tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One beyond the last index of each dimension."""
        return tuple(map(add, self.offsets, self.sizes))

    @lru_cache(maxsize=1024)  # noqa: B019 (boxes are small, and many are equal)
    def meet(self, other: Box) -> Box | None:
        """Return what both have; None: nothing."""
        if self == other:
            return self
        begin = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(map(sub, map(min, self.ends, other.ends), begin))
        return Box(begin, sizes) if min(sizes, default=1) > 0 else None

    @lru_cache(maxsize=1024)  # noqa: B019 (boxes are small, and many are equal)
    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that holds `outer`."""
        begin = self.begin_in(outer)
        return tuple(slice(a, a + n) for a, n in zip(begin, self.sizes, strict=True))

    def begin_in(self, outer: Box) -> tuple[int, ...]:
        """Return where it begins, counted from where `outer` does."""
        return tuple(map(sub, self.offsets, outer.offsets))

    @lru_cache(maxsize=1024)  # noqa: B019 (boxes are small, and many are equal)
    def run_in(self, within: Box) -> tuple[int, int] | None:
        """Return (first, count) where this box is consecutive elements of `within`, row by row.

        None where it is not: then it is cut in a dimension that is not the outermost of more than
        one index.
        """
        first = 0
        for dim, (a, n) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if n != within.sizes[dim] and math.prod(self.sizes[:dim]) != 1:
                return None
            first = first * within.sizes[dim] + a - within.offsets[dim]
        return first, self.num_elements

    def __str__(self) -> str:
        """Return indices, such as ``[0:4, 2:8]``."""
        return _text(self)


@lru_cache(maxsize=1024)
def _text(box: Box) -> str:
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(box.offsets, box.ends, strict=True))}]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that this rank has, and its memory: a view of the tensor or of the part."""

    box: Box
    memory: torch.Tensor


def full_box(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor."""
    return Box((0,) * len(shape), tuple(shape))


def pieces_of(name: str, tensor: torch.Tensor) -> list[Piece]:
    """Return this rank's pieces of a tensor; of one that is no DTensor, all of it.

    Raises:
        UsageError: It holds terms of a reduction, is not dense, or has no values.
    """
    require_dense(name, tensor)
    held = (tensor.part if isinstance(tensor, DTensor) else tensor).detach()
    if not isinstance(tensor, DTensor):
        return [Piece(full_box(held.shape), held)] if held.numel() else []
    spec = tensor.spec
    if spec.partial:
        raise UsageError(
            "a tensor of terms of a reduction cannot be in a checkpoint",
            seen=f"{name} is {spec}",
            fix="Redistribute it to Replicate() or Shard() before.",
        )
    if spec.coordinate is None:
        return []
    cut = _cut(spec.shape, spec.placements, spec.mesh.shape, tuple(spec.coordinate))
    return [Piece(box, held if box.sizes == held.shape else held[here]) for box, here in cut]


@lru_cache(maxsize=256)
def _cut(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> list[tuple[Box, tuple[slice, ...]]]:
    """Return a rank's boxes, and their place in its part; cached, as many are cut the same way."""
    runs = [
        _placed(runs_of(size, cuts_of(placements, sizes, dim), sizes, coordinate))
        for dim, size in enumerate(shape)
    ]
    found: list[tuple[Box, tuple[slice, ...]]] = []
    for chosen in itertools.product(*runs):
        box = Box(tuple(at for _, at, _ in chosen), tuple(size for size, _, _ in chosen))
        if box.num_elements:
            found.append((box, tuple(slice(local, local + size) for size, _, local in chosen)))
    return found


def _placed(runs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Add to each run where it begins in the part."""
    begins = itertools.accumulate((size for size, _ in runs), initial=0)
    return [(size, at, local) for (size, at), local in zip(runs, begins, strict=False)]


def fault_of_cover(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Say which elements of a tensor are in two boxes, outside, or in none; None: each in one.

    Cost:
        As `fault_of_boxes`. Answers are kept, as tensors of a shape mostly are cut the same way.
    """
    return _fault_of_cover(tuple(shape), tuple(boxes))


@lru_cache(maxsize=128)
def _fault_of_cover(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> str | None:
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"slice {box.offsets}, {box.sizes} has another number of dimensions"
        if max(*box.offsets, *box.sizes, 0, 0) > _LARGEST:
            return f"slice {box} is outside of {list(shape)}"
    rows = np.array([[*box.offsets, *box.sizes] for box in boxes], np.int64)
    return fault_of_boxes(shape, rows.reshape(len(boxes), 2 * len(shape)))


def fault_of_boxes(shape: tuple[int, ...], rows: Array) -> str | None:
    """Return what `fault_of_cover` does, of boxes in an array [k, 2d]: offsets, then sizes.

    Cost:
        O(k log k) in arrays where they are a grid, as in most meshes. Else boxes are compared with
        those that begin before their end in one dimension: that in which these are fewest. For rows
        or columns there are none. If there are more than 2**28 pairs, that is the answer.
    """
    return None if _is_grid(shape, rows) else _fault_of_rows(shape, rows)


def _fault_of_rows(shape: tuple[int, ...], rows: Array) -> str | None:
    d = len(shape)
    if not d:
        return None if len(rows) == 1 else f"a number is stored {len(rows)} times"
    rows = rows[np.lexsort(rows.T[::-1])]
    begins, sizes = rows[:, :d], rows[:, d:]
    ends = begins + sizes
    limits = np.array([min(n, _LARGEST) for n in shape], np.int64)
    for row in np.flatnonzero((begins < 0).any(1) | (sizes < 1).any(1))[:1]:
        return f"slice {(*begins[row].tolist(),)}, {(*sizes[row].tolist(),)} is none"
    for row in np.flatnonzero((ends > limits).any(1))[:1]:
        return f"slice {_box_of(rows[row])} is outside of {list(shape)}"
    counts = [_num_begun(begins[:, dim], ends[:, dim]) for dim in range(d)]
    dim = min(range(d), key=lambda dim: counts[dim])
    if counts[dim] > _MOST_PAIRS:
        return f"its {len(rows)} slices are cut too irregularly: {counts[dim]} pairs may overlap"
    rows = rows[np.argsort(rows[:, dim], kind="stable")]
    columns = [(rows[:, n].copy(), rows[:, n] + rows[:, d + n]) for n in range(d)]
    for pairs in _pairs(*columns.pop(dim)):
        met = pairs
        for begin, end in columns:
            first, second = met
            met = met[:, (begin[first] < end[second]) & (begin[second] < end[first])]
        if met.size:
            first, second = (_box_of(rows[row]) for row in met[:, 0])
            return f"slices {first} and {second} overlap"
    total = math.prod(shape)  # of Python's integers, which have no largest one
    missing = total - sum(map(math.prod, sizes.tolist()))
    return f"{missing} of {total} elements are in no slice" if missing else None


def _num_begun(begins: Array, ends: Array) -> int:
    """Return how many pairs of intervals there are, of which one begins within the other."""
    at = np.argsort(begins, kind="stable")
    return int((np.searchsorted(begins[at], ends[at]) - np.arange(1, len(at) + 1)).sum())


def _pairs(begins: Array, ends: Array) -> Iterator[Array]:
    """Iterate over arrays [2, n] of the pairs that `_num_begun` counts; `begins` ascend."""
    counts = np.searchsorted(begins, ends) - np.arange(1, len(begins) + 1)
    numbers, row = np.cumsum(counts) // _PAIRS_AT_ONCE, 0
    while row < len(counts):
        end = int(np.searchsorted(numbers, numbers[row], "right"))
        mine = counts[row:end]
        first = np.repeat(np.arange(row, end), mine)
        within = np.arange(len(first)) - np.repeat(np.cumsum(mine) - mine, mine)
        yield np.stack([first, first + 1 + within])
        row = end


def _box_of(row: Array) -> Box:
    numbers = row.tolist()
    return Box(tuple(numbers[: len(numbers) // 2]), tuple(numbers[len(numbers) // 2 :]))


def _is_grid(shape: tuple[int, ...], rows: Array) -> bool:
    """Return whether boxes are all combinations of intervals that cut each dimension once."""
    d = len(shape)
    if not d or not len(rows) or rows.shape[1] != 2 * d:
        return False
    cell, count = np.zeros(len(rows), np.int64), 1
    for dim, size in enumerate(shape):
        offsets, sizes = rows[:, dim], rows[:, d + dim]
        begins, first, number = np.unique(offsets, return_index=True, return_inverse=True)
        lengths = sizes[first]
        ends = begins + lengths
        is_cut_once = begins[0] == 0 and ends[-1] == size and (begins[1:] == ends[:-1]).all()
        if not is_cut_once or (lengths < 1).any() or (sizes != lengths[number]).any():
            return False
        cell = cell * len(begins) + number
        count *= len(begins)
        if count > len(rows):
            return False
    return count == len(rows) == len(np.unique(cell))
