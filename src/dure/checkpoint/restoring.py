"""Loading a sharded checkpoint into existing tensors, in any sharding.

1. Each rank reads the manifest and compares it with the state: names, shapes, values.
   All report the outcome, and rank 0 compares their manifests. Nothing was changed up to here.
2. Each reads what it needs, slice by slice, into its tensors, and all report the outcome. If
   a file turns out to be damaged, tensors that were read before it have new values already.
3. Values are put in their places, and objects that have `load_state_dict` are given their state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import catalog_of, unless_changed
from dure.checkpoint.contents import Catalog
from dure.checkpoint.dataclass_fields import Fields
from dure.checkpoint.fresh_state import like_saved, state_to_fill, with_memory
from dure.checkpoint.fsspec_path import AnyPath
from dure.checkpoint.objects import bare, few, is_stateful, own_state
from dure.checkpoint.reading import Mapped
from dure.checkpoint.slice_files import Slice, SliceFile, Stored
from dure.checkpoint.slices import Box, Piece, pieces_of
from dure.checkpoint.tree import Leaf, Named, decode, entries_of, flatten, put
from dure.comm.streams import in_streams_of_caller
from dure.errors import CheckpointError, CheckpointMismatch
from dure.tensor import DTensor

__all__ = [
    "Loaded",
    "Read",
    "give_back",
    "in_order",
    "load_from",
    "modules_in",
    "read_slices",
    "reads_of",
    "was_written",
]

_NOT_LOADED = "the checkpoint was not loaded"
_MOST_OPEN = 64


class Loaded(NamedTuple):
    """What a load found: names of the state that are not in the checkpoint, and the reverse.

    Obtained from:
        `dure.checkpoint.load`.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    num_bytes: int
    """Bytes of tensors that this rank read."""


class Read(NamedTuple):
    """Elements of one slice, and where they go."""

    part: Slice
    stored: Stored
    box: Box
    to: torch.Tensor


def load_from(
    path: AnyPath,
    state_dict: MutableMapping[str, Any],
    ranks: Ranks,
    partial: bool,
    reading: Callable[[AnyPath], Catalog] = catalog_of,
) -> Loaded:
    """Load the checkpoint in the folder `path` into a state, in place.

    Raises:
        CheckpointException: It failed on some ranks.

    Collective:
        All of `ranks`. Two exchanges.
    """
    loadings: list[_Loading] = []

    def compare() -> bytes:
        loading = _Loading(path, state_dict, reading(path), partial)
        loading.compare()
        loadings.append(loading)
        return loading.catalog.digest

    def read() -> None:
        if not same:
            raise CheckpointError(
                "ranks see different checkpoints",
                path=str(path),
                seen="their manifests differ",
                fix="Give all ranks the same folder, and do not save into it during a load.",
            )
        with unless_changed(loadings[0].catalog):
            loadings[0].read(ranks.num_threads)

    same = ranks.decided(_NOT_LOADED, compare, lambda digests: len(set(digests)) == 1)
    ranks.decided(_NOT_LOADED, read)
    return loadings[0].loaded


class _Loading:
    """One rank's load."""

    def __init__(
        self, path: AnyPath, state_dict: MutableMapping[str, Any], catalog: Catalog, partial: bool
    ) -> None:
        self._path, self._given = path, state_dict
        self.catalog, self._partial = catalog, partial
        self._state = {key: self._own_state(key, state_dict[key]) for key in in_order(state_dict)}
        self._leaves = flatten(self._state)
        self._made = self._with_memory()
        self._leaves |= self._made
        self._num_read = 0

    def _own_state(self, key: str, value: Any) -> Any:
        """Return a state to fill; an optimizer's has exactly the entries that are in the file.

        Parameters may have been stepped since it was saved, or not been stepped before it.
        """
        state = own_state(value)
        if not isinstance(value, torch.optim.Optimizer):
            return state
        if not {"state", "param_groups"} <= state.keys():  # it has a form of its own
            return state
        packed_groups = [len(group["params"]) for group in state["param_groups"]]
        if packed_groups != [len(group["params"]) for group in value.param_groups]:  # by its hooks
            return state
        saved = self._saved_state(key)
        made = state["state"] if self._partial else {}
        for name, entry in saved.items():
            if not isinstance(name, int):  # not of a parameter
                made[name] = like_saved(entry, state["state"].get(name), self.catalog.kinds)
        for group, packed in zip(value.param_groups, state["param_groups"], strict=True):
            for number, parameter in zip(packed["params"], group["params"], strict=True):
                if number in saved:
                    made[number] = state_to_fill(
                        value, group, parameter, saved[number], self.catalog.kinds
                    )
        state["state"] = made
        return state

    def _with_memory(self) -> dict[str, Leaf]:
        """Return tensors for those on the meta device that the file has.

        Those of modules stay: `load_state_dict` of a module would copy into tensors without memory.
        """
        leaves, modules = self._leaves, modules_in(self._given)
        names = [n for n in leaves if n in self.catalog.leaves and leaves[n].path[0] not in modules]
        return with_memory({name: leaves[name] for name in names})

    def _saved_state(self, key: str) -> Mapping[Any, Any]:
        """Return the state of an optimizer's parameters in the file, a `Named` for each tensor."""
        for name, node in entries_of(self.catalog.tree):
            if name == key:
                for part, inner in entries_of(node):
                    if part == "state":
                        found = decode(inner, Named, Fields)
                        return cast(Mapping[Any, Any], found) if isinstance(found, dict) else {}
        return {}

    @property
    def loaded(self) -> Loaded:
        """Names that were missing, names that were not asked for, and how much was read."""
        names = self.catalog.leaves.keys()
        missing = sorted(self._leaves.keys() - names)
        return Loaded(missing, sorted(names - self._leaves.keys()), self._num_read)

    def compare(self) -> None:
        """Compare the state with the manifest, before anything is changed.

        Raises:
            CheckpointMismatch: They differ.
        """
        loaded = self.loaded
        if loaded.missing_keys and not self._partial:
            raise self._mismatch(
                f"Missing key in checkpoint state_dict: {few(loaded.missing_keys)}."
            )
        faults = [
            fault
            for name, leaf in self._leaves.items()
            if (fault := self._fault(name, leaf)) is not None
        ]
        if faults:
            raise self._mismatch("the checkpoint is of another state", few(faults, "; "))
        self._reads = self._planned()

    def _mismatch(self, what: str, seen: str = "") -> CheckpointMismatch:
        return CheckpointMismatch(what, path=str(self._path), seen=seen)

    def _fault(self, name: str, leaf: Leaf) -> str | None:
        """Say what keeps a leaf from being loaded; None: nothing, or it is missing."""
        kind, value = self.catalog.kind_of(name), leaf.value
        if kind is None:
            wanted = name in self.catalog.leaves and isinstance(value, torch.Tensor)
            return f"{name} is no tensor in the checkpoint" if wanted else None
        if not isinstance(value, torch.Tensor):
            return f"{name} is {kind} in the checkpoint, and a {type(value).__name__} here"
        if tuple(value.shape) != kind.shape:
            saved, here = list(kind.shape), list(value.shape)
            return f"Size mismatch between saved {saved} and current: {here} for {name}"
        if kind.torch_dtype.is_complex and not value.is_complex():
            return f"{name} is {kind} in the checkpoint, and {value.dtype} here"
        return None

    def _planned(self) -> list[Read]:
        """Work out which elements go where."""
        reads: list[Read] = []
        for name, leaf in self._leaves.items():
            if self.catalog.kind_of(name) is None:
                continue
            for piece in pieces_of(name, leaf.value):
                reads += reads_of(self.catalog, self.catalog.leaves[name].value, piece)
        return reads

    def read(self, num_threads: int) -> None:
        """Fill the tensors, in so many threads, then the values, then the objects.

        Raises:
            CheckpointError: A file is not what the manifest says.
        """
        read_slices(self._path, self.catalog, self._reads, num_threads)
        for name, leaf in self._made.items():
            self._put(name, leaf, leaf.value)
        kinds = self.catalog.kinds
        self._num_read = sum(kinds[r.part.name].num_bytes(r.box) for r in self._reads)
        for leaf in self._leaves.values():
            if isinstance(leaf.value, torch.Tensor):
                was_written(leaf.value)
        for name, leaf in self._leaves.items():
            saved = self.catalog.leaves.get(name)
            if saved is not None and not isinstance(saved.value, Named):
                self._put(name, leaf, saved.value)
        give_back(self._given, self._state)

    def _put(self, name: str, leaf: Leaf, value: Any) -> None:
        try:
            put(self._state, leaf.path, value)
        except TypeError:
            raise self._mismatch(
                "a value cannot be put in its place",
                f"{name} is in something that takes no items",
            ) from None


def reads_of(catalog: Catalog, tensor: str, piece: Piece) -> Iterator[Read]:
    """Iterate over the reads that fill a piece of a stored tensor."""
    for box, stored, both in catalog.cut(tensor).meeting(piece.box):
        to = piece.memory if both == piece.box else piece.memory[both.within(piece.box)]
        yield Read(Slice(tensor, box), stored, both, to)


def read_slices(
    path: AnyPath,
    catalog: Catalog,
    reads: list[Read],
    num_threads: int,
    mapped: Mapped | None = None,
) -> None:
    """Read elements from the files below `path`, in the order in which they are stored.

    The files of these reads are opened and compared with the manifest first. Up to 64 stay open,
    and are read even if a save replaces the checkpoint in the meantime; others are opened again for
    each slice.

    Args:
        path: The folder.
        catalog: Its manifest.
        reads: The elements, and where they go.
        num_threads: How many threads read.
        mapped: For several calls: its files are used, each of which is compared once.

    Raises:
        CheckpointDamaged: A file is not what the manifest says.
        CheckpointError: A file cannot be opened or read.
    """
    files = dict[int, SliceFile]()
    reads = sorted(reads, key=lambda r: (r.stored.file, r.stored.begin))
    waiting = iter(reads)

    def work() -> None:
        with torch.no_grad():
            for part, stored, box, to in waiting:
                dtype = catalog.kinds[part.name].torch_dtype
                files[stored.file].read(part, stored, dtype, box, to)

    try:
        for number, of_file in groupby(reads, lambda read: read.stored.file):
            if mapped is not None:
                files[number] = mapped.compared(number)
                continue
            (name, record), these = catalog.files[number], list(of_file)
            num_wanted = sum(catalog.kinds[r.part.name].num_bytes(r.box) for r in these)
            file = SliceFile(path / name, record, len(files) < _MOST_OPEN, num_wanted)
            files[number] = file
            file.compare([(read.part, read.stored) for read in these], catalog.kinds)
        work_here = in_streams_of_caller(work, (read.to for read in reads))
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(work_here) for _ in range(num_threads - 1)]
            work()
        for other in others:
            other.result()
    finally:
        for file in files.values():
            file.close()


def in_order(state_dict: Mapping[str, Any]) -> list[str]:
    """Return the keys in the order of loading: objects may communicate, so ranks must agree."""
    return sorted(state_dict, key=str)


def modules_in(state_dict: Mapping[str, Any]) -> list[str]:
    """Return the keys of modules."""
    return [key for key, value in state_dict.items() if isinstance(bare(value), nn.Module)]


def give_back(given: MutableMapping[str, Any], state: Mapping[str, Any]) -> None:
    """Give objects their state, and put the rest in its place; all ranks in the same order."""
    for key in in_order(given):
        value = given[key]
        if is_stateful(value):
            bare(value).load_state_dict(state[key])
        else:
            given[key] = state[key]


def was_written(tensor: torch.Tensor) -> None:
    """Count a tensor as written, for graphs that have saved it for backward."""
    held = tensor.part if isinstance(tensor, DTensor) else tensor
    if not held.is_inference():
        torch.autograd.graph.increment_version(held)
