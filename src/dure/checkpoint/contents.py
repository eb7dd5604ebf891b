"""What a checkpoint consists of: its state without tensors, and for each tensor its slices.

The slices of a tensor are columns of numbers (`runs`): offsets and sizes by dimension, the file of
each, where it begins there, and the place of its checksum. They stay as they are in the manifest
until a tensor is asked for. Then they are checked: each element must be in exactly one slice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from dure.checkpoint.files import damaged
from dure.checkpoint.fsspec_path import AnyPath
from dure.checkpoint.runs import Runs, column_of
from dure.checkpoint.slice_files import FileRecord, Slice, Stored, TensorKind
from dure.checkpoint.slices import Box, fault_of_boxes, fault_of_cover, full_box
from dure.checkpoint.tree import Leaf, Named, decode, flatten

__all__ = ["Catalog", "Columns", "StoredFile", "TensorSlices", "columns_of", "leaves_of"]

Array = np.ndarray[Any, Any]
_FEW = 32
"""Slices of a tensor up to which each is looked at on its own."""
_MOST_NUMBERS = 1 << 24
"""Of indices in all ways in which tensors are cut into more slices than that.

Runs claim numbers that are not in the manifest: a small one must not need seconds, or gigabytes. A
dimension of 10,000 ranks has 20,000 numbers; tensors that are cut the same way count once.
"""
_BYTES_PER_SLICE = 8
"""That the header of a file has at least: the digits of its checksum, or a name and numbers."""


class StoredFile(NamedTuple):
    """A file of slices."""

    name: str
    """In the checkpoint's folder, or a path."""
    record: FileRecord


class Columns(NamedTuple):
    """The slices of a tensor, as a manifest has them; one row per slice."""

    offsets: list[Runs]
    """By dimension."""
    sizes: list[Runs]
    files: Runs
    """Numbers of files."""
    begins: Runs
    """Where each slice begins, behind the header of its file."""
    places: Runs | None
    """Which of the checksums in the header of its file is its own; None: see `sums`."""
    sums: Sequence[int | None] = ()
    """The CRC-32C of each slice, if there are no `places`; None: not known."""


def columns_of(
    boxes: Sequence[Box],
    num_dims: int,
    files: list[int],
    begins: list[int],
    sums: Sequence[int | None],
) -> Columns:
    """Return the columns of slices that have no checksums in their files.

    Args:
        boxes: The slices.
        num_dims: Of the tensor.
        files: The number of the file of each.
        begins: Where each begins, behind the header of its file.
        sums: The CRC-32C of each; None: not known.
    """
    rows = [[*box.offsets, *box.sizes] for box in boxes]
    dims = [list(column) for column in zip(*rows, strict=True)] or [[]] * (2 * num_dims)
    return Columns(dims[:num_dims], dims[num_dims:], files, begins, None, sums)


class TensorSlices:
    """The slices of one tensor.

    Args:
        shape: The tensor's.
        columns: As they are in the manifest.
        files: All files.

    Raises:
        ValueError: The columns are not those of slices that have each element once.
    """

    def __init__(self, shape: tuple[int, ...], columns: Columns, files: Sequence[StoredFile]):
        self._files, self._sums = files, columns.sums
        dims = list(columns.offsets) + list(columns.sizes)
        if len(columns.offsets) != len(shape) or len(columns.sizes) != len(shape):
            raise ValueError(f"it has {len(dims)} columns of indices, and the shape {list(shape)}")
        self._dims = [column_of(runs) for runs in dims]
        self._file, self._begin = column_of(columns.files), column_of(columns.begins)
        self._place = None if columns.places is None else column_of(columns.places)
        num_sums = len(columns.sums) if self._place is None else len(self._place)
        lengths = {*map(len, self._dims), len(self._file), len(self._begin), num_sums}
        if len(lengths) > 1:
            raise ValueError(f"its columns have {sorted(lengths)} rows")
        if self._file.largest() >= len(files):
            raise ValueError(f"it is in file {self._file.largest()} of {len(files)}")
        if len(self) * len(dims) > _MOST_NUMBERS:
            raise ValueError(f"it has {len(self)} slices of {len(shape)} dimensions")
        self._shared = json.dumps(dims) if dims and len(self) > _FEW else ""
        """Indices as text, a key for what is known of them; "": of few slices, or of a number."""
        fault = _fault(shape, self._shared) if self._shared else fault_of_cover(shape, self.boxes())
        if fault:
            raise ValueError(fault)

    def __len__(self) -> int:
        """Return the number of slices."""
        return len(self._file)

    @property
    def indices(self) -> tuple[str, int]:
        """A text that is equal for tensors that are cut the same way, and its count of numbers.

        "" and 0 for few slices, each of which is written out.
        """
        return self._shared, len(self) * len(self._dims) if self._shared else 0

    def box(self, row: int) -> Box:
        """Return the indices of a slice."""
        numbers = [column[row] for column in self._dims]
        d = len(numbers) // 2
        return Box(tuple(numbers[:d]), tuple(numbers[d:]))

    def boxes(self) -> list[Box]:
        """Return the indices of all slices."""
        if not self._dims:
            return [Box((), ())] * len(self)
        rows = list(zip(*(column.numbers() for column in self._dims), strict=True))
        d = len(self._dims) // 2
        return [Box(row[:d], row[d:]) for row in rows]

    def stored(self, row: int) -> Stored:
        """Return where a slice is."""
        file = self._file[row]
        begin = self._files[file].record.header_bytes + self._begin[row]
        if self._place is None:
            return Stored(file, begin, self._sums[row])
        return Stored(file, begin, None, self._place[row])

    def meeting(self, box: Box) -> Iterator[tuple[Box, Stored, Box]]:
        """Iterate over the slices that have elements of a box: indices, place, common indices."""
        rows = _meeting(self._shared, box) if self._shared else range(len(self))
        for row in rows:
            own = self.box(row)
            both = own.meet(box)
            if both is not None:
                yield own, self.stored(row), both

    def rows_in(self, number: int) -> list[int]:
        """Return which slices are in a file. Cost: O(runs)."""
        return self._file.find(number)


@lru_cache(maxsize=16)
def _table(text: str) -> Array:
    """Return [k, 2d]: offsets and sizes. Many tensors are cut the same way, so tables are kept."""
    return np.stack([column_of(runs).array() for runs in json.loads(text)], 1)


@lru_cache(maxsize=256)
def _fault(shape: tuple[int, ...], text: str) -> str | None:
    return fault_of_boxes(shape, _table(text))


@lru_cache(maxsize=256)
def _meeting(text: str, box: Box) -> list[int]:
    """Return the rows of the table that have elements of a box."""
    table, d = _table(text), len(box.sizes)
    begins, sizes = table[:, :d], table[:, d:]
    is_met = (begins < np.array(box.ends)) & (begins + sizes > np.array(box.offsets))
    return np.flatnonzero(is_met.all(1)).tolist()


@dataclass(frozen=True)
class Catalog:
    """What a checkpoint consists of."""

    folder: AnyPath
    tree: Any
    """The state as `tree.encode` makes it. In it are tensors' names, some maybe in two places."""
    kinds: dict[str, TensorKind]
    files: Sequence[StoredFile]
    columns: dict[str, Columns]
    """Of each tensor; those without elements have no rows."""
    digest: bytes = b""
    """Equal for two ranks that read the same checkpoint."""
    _cuts: dict[str, TensorSlices] = field(default_factory=dict[str, TensorSlices], compare=False)
    _numbers: dict[str, int] = field(default_factory=dict[str, int], compare=False)
    """The `indices` of tensors so far."""

    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """Tensors, as `Named`, and values of the state by name."""
        return leaves_of(self.tree)

    def kind_of(self, name: str) -> TensorKind | None:
        """Return what the leaf of that name is; None: no tensor, or not there; errors as `cut`."""
        leaf = self.leaves.get(name)
        if leaf is None or not isinstance(leaf.value, Named):
            return None
        self.cut(leaf.value)  # a shape that its slices do not have is damage
        return self.kinds[leaf.value]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(map(self.num_bytes_of, self.kinds))

    def num_bytes_of(self, name: str) -> int:
        """Return the bytes of a tensor."""
        kind = self.kinds[name]
        return kind.num_bytes(full_box(kind.shape))

    @property
    def has_sums(self) -> bool:
        """Whether all slices have checksums."""
        return all(c.places is not None or None not in c.sums for c in self.columns.values())

    def cut(self, name: str) -> TensorSlices:
        """Return the slices of a tensor.

        Raises:
            CheckpointDamaged: They are not of this tensor, or do not have each element once.
        """
        if name not in self._cuts:
            try:
                found = TensorSlices(self.kinds[name].shape, self.columns[name], self.files)
                self._count(*found.indices)
            except (ValueError, TypeError, OverflowError, LookupError) as e:
                raise damaged(self.folder, f"of {name!r}, {e}") from None
            self._cuts[name] = found
        return self._cuts[name]

    def _count(self, indices: str, count: int) -> None:
        if indices not in self._numbers:
            total = count + sum(self._numbers.values())
            if total > _MOST_NUMBERS:
                raise ValueError(f"its slices and those of other tensors have {total} indices")
            self._numbers[indices] = count

    def in_file(self, number: int) -> list[tuple[Slice, Stored]]:
        """Return the slices of a file, in their order there.

        Raises:
            CheckpointDamaged: As `cut`, of any tensor; or they are more than the header can have.

        Cost:
            O(runs) of all tensors.
        """
        (file, record), total = self.files[number], 0
        rows: dict[str, list[int]] = {}
        for name in self.kinds:
            rows[name] = self.cut(name).rows_in(number)
            total += len(rows[name])
            if total * _BYTES_PER_SLICE > record.header_bytes:
                seen = f"{total} slices or more are in {file}, whose header is too short"
                raise damaged(self.folder, f"of {name!r}, {seen}")
        found: list[tuple[Slice, Stored]] = []
        for name, mine in rows.items():
            cut = self.cut(name)
            found += [(Slice(name, cut.box(row)), cut.stored(row)) for row in mine]
        return sorted(found, key=lambda one: one[1].begin)

    def parts(self, name: str) -> list[tuple[Slice, Stored]]:
        """Return all slices of a tensor; errors as `cut`."""
        cut = self.cut(name)
        return [(Slice(name, box), cut.stored(row)) for row, box in enumerate(cut.boxes())]


def leaves_of(tree: Any) -> dict[str, Leaf]:
    """Return the leaves of a state by name, tensors as `Named`; errors as `flatten`, `decode`."""
    return flatten(decode(tree, Named))
