"""Folders of weights as Hugging Face has them: read into any sharding, written from any.

    model-00001-of-00002.safetensors, ...     whole tensors; model.safetensors where it is one file
    model.safetensors.index.json              {"weight_map": {name: file}, ...}

No rank ever holds the whole. To load is to load a checkpoint whose slices are whole tensors that
have no checksum. To save, rank 0 makes the files, in full length under hidden names, and each
rank copies what it has to its place in them, mapped. When all are flushed, rank 0 renames them, the
index last: until then a reader finds the old index, or none.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import Catalog, Stored, Unreadable, catalog_of
from dure.checkpoint.files import DTYPES, open_file, read_file
from dure.checkpoint.folder import flush, make, replace_file
from dure.checkpoint.restoring import load_from
from dure.checkpoint.saving import Saving, Taken
from dure.checkpoint.slice_files import Kind, Layout, Slice
from dure.checkpoint.slices import whole_box
from dure.checkpoint.tree import tensor_node
from dure.errors import CheckpointError, UsageError

__all__ = ["MAX_FILE_BYTES", "catalog_of_weights", "consolidate", "save_weights"]

MAX_FILE_BYTES = 5_000_000_000
"""Where a file ends and the next begins, as Hugging Face's libraries do it."""

_INDEX = "model.safetensors.index.json"
_HIDDEN = ".saving-"
_MAX_HEADER_BYTES = 100_000_000
_NAMES = frozenset(DTYPES.values())
_NOT_SAVED = "the weights were not saved"


def catalog_of_weights(folder: Path) -> Catalog:
    """Return what lies where in a folder of weights; reads the index and the files' headers.

    Links are followed, as the files of a download cache are links.

    Raises:
        CheckpointError: There are no weights, or a file is not what it says.
    """
    try:
        return _catalog(folder)
    except (Unreadable, OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        seen = f"{type(e).__name__}: {e}; in {folder}"
        raise CheckpointError("the weights cannot be used", path=str(folder), seen=seen) from e


def _catalog(folder: Path) -> Catalog:
    index = folder / _INDEX
    wanted: dict[str, str] | None = None
    if index.exists():
        wanted = cast(dict[str, str], json.loads(read_file(index.resolve()))["weight_map"])
        files = sorted(set(wanted.values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise Unreadable(f"there is no {_INDEX} and no file of safetensors in {folder}")
    kinds: dict[str, Kind] = {}
    catalog = Catalog({}, kinds, {}, {})
    for file in files:
        if Path(file).name != file:
            raise Unreadable(f"{_INDEX} names {file!r}, which leaves the folder")
        path = (folder / file).resolve()
        layout, found = _layout(path)
        catalog.layouts[str(path)] = layout
        for name, kind in found.items():
            if wanted is not None and wanted.get(name) != file:
                continue
            if name in kinds:
                raise Unreadable(f"{name!r} is in two files, one of them {file}")
            kinds[name], catalog.tree[name] = kind, tensor_node(name)
            box = whole_box(kind.shape)
            catalog.slices[name] = {box: Stored(str(path), None)} if box.num_elements else {}
    missing = (wanted or {}).keys() - kinds.keys()
    if missing:
        raise Unreadable(f"{min(missing)!r} is not in the file that {_INDEX} names")
    return catalog


def _layout(path: Path) -> tuple[Layout, dict[str, Kind]]:
    """Read the header of a file of safetensors."""
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = file.read(8)
        count = int.from_bytes(length, "little")
        if len(length) < 8 or count > min(_MAX_HEADER_BYTES, size - 8):
            raise Unreadable(f"{path.name} has no header of safetensors")
        text = file.read(count)
    entries = cast(dict[str, dict[str, Any]], json.loads(text))
    kinds: dict[str, Kind] = {}
    begins: dict[Slice, int] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _NAMES:
            raise Unreadable(f"{name!r} in {path.name} is of an unknown dtype, {entry['dtype']!r}")
        kind = Kind(entry["dtype"], tuple(entry["shape"]))
        begin, end = entry["data_offsets"]
        box = whole_box(kind.shape)
        numbers = [begin, end, *kind.shape]
        if not all(type(n) is int and n >= 0 for n in numbers) or end > size - 8 - count:
            raise Unreadable(f"{name!r} in {path.name} is said to lie outside of it")
        if end - begin != kind.num_bytes(box):
            raise Unreadable(f"{name!r} in {path.name} is said to be {end - begin} bytes, {kind}")
        kinds[name], begins[Slice(name, box)] = kind, 8 + count + begin
    return Layout(length + text, begins, size), kinds


class _Files:
    """Files of whole tensors in the making.

    Args:
        folder: Where they are to be.
        kinds: What is in them.
        numbers: Of some tensors' files, from 1 on.
        max_bytes: How large a file gets; a larger tensor has one for itself.

    Raises:
        UsageError: Tensors of a kind that the file format lacks.
    """

    def __init__(
        self, folder: Path, kinds: dict[str, Kind], numbers: Mapping[str, int], max_bytes: int
    ) -> None:
        self._folder = folder
        for name, kind in kinds.items():
            if kind.dtype not in _NAMES:
                raise UsageError(
                    "a folder of weights has no such tensors", seen=f"{name!r} is {kind}"
                )
        cut: dict[int, list[Slice]] = {}
        number, filled = max(numbers.values(), default=1), 0
        for name, kind in kinds.items():
            part = Slice(name, whole_box(kind.shape))
            num_bytes = kind.num_bytes(part.box)
            if name not in numbers:
                if filled and filled + num_bytes > max_bytes:
                    number, filled = number + 1, 0
                filled += num_bytes
            cut.setdefault(numbers.get(name, number), []).append(part)
        names = [f"model-{i + 1:05d}-of-{len(cut):05d}.safetensors" for i in range(len(cut))]
        names = ["model.safetensors"] if len(cut) == 1 else names
        self._layouts = {
            file: Layout.of(cut[n], kinds, {"format": "pt"})
            for file, n in zip(names, sorted(cut), strict=True)
        }
        self._kinds = kinds
        self._maps: dict[str, mmap.mmap] = {}

    def make(self) -> None:
        """Make them under hidden names, in full length, without tensors."""
        for file, layout in self._layouts.items():
            with (self._folder / f"{_HIDDEN}{file}").open("wb") as made:
                made.write(layout.header)
                made.truncate(layout.num_bytes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors, mapped: what is written to them is written to the files."""
        found: dict[str, torch.Tensor] = {}
        for file, layout in self._layouts.items():
            with (self._folder / f"{_HIDDEN}{file}").open("r+b") as made:
                mapped = self._maps[file] = mmap.mmap(made.fileno(), 0)
            for part, begin in layout.begins.items():
                kind, count = self._kinds[part.name], part.box.num_elements
                flat = torch.empty(0, dtype=kind.torch_dtype)
                if count:
                    flat = torch.frombuffer(
                        mapped, dtype=kind.torch_dtype, count=count, offset=begin
                    )
                found[part.name] = flat.view(kind.shape)
        return found

    def flush(self) -> None:
        """Write what was mapped through to the disk."""
        for mapped in self._maps.values():
            mapped.flush()

    def publish(self) -> None:
        """Give the files their names, the index last; remove those of weights before."""
        for file in self._layouts:
            (self._folder / f"{_HIDDEN}{file}").rename(self._folder / file)
        index = self._folder / _INDEX
        if len(self._layouts) > 1:
            placed = {p.name: f for f, layout in self._layouts.items() for p in layout.begins}
            size = sum(kind.num_bytes(whole_box(kind.shape)) for kind in self._kinds.values())
            fields = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
            replace_file(index, json.dumps(fields, indent=2).encode())
        else:
            index.unlink(missing_ok=True)
        flush(self._folder)
        for path in self._folder.glob("model*.safetensors"):
            if path.name not in self._layouts:
                path.unlink()


def save_weights(
    folder: Path,
    state_dict: Mapping[str, Any] | Taken,
    ranks: Ranks,
    numbers: Mapping[str, int],
    max_bytes: int,
) -> None:
    """Save a state of tensors as a folder of weights.

    Raises:
        CheckpointException: It failed on some ranks, or there are values in the state.

    Collective: all of `ranks`. Four exchanges.
    """
    saving = Saving(ranks, state_dict, lambda: make(folder))
    files: list[_Files] = []

    def prepare() -> None:
        kinds = saving.kinds()
        values = saving.values()
        if values:
            raise UsageError(
                "a folder of weights has tensors only",
                seen=f"{min(values)!r} is a value",
                fix="Save get_model_state_dict(model).",
            )
        files.append(_Files(folder, kinds, numbers, max_bytes))
        if ranks.rank == 0:
            files[0].make()

    def write() -> None:
        mapped = files[0].tensors()
        for part, memory in saving.mine().items():
            whole = whole_box(mapped[part.name].shape)
            mapped[part.name][part.box.within(whole)].copy_(memory)
        files[0].flush()

    ranks.all_or_none(_NOT_SAVED, prepare)
    ranks.all_or_none(_NOT_SAVED, write)
    ranks.all_or_none(_NOT_SAVED, lambda: files[0].publish() if ranks.rank == 0 else None)


def consolidate(folder: Path, to: Path, prefix: str = "", max_bytes: int = MAX_FILE_BYTES) -> None:
    """Make a folder of weights of a checkpoint, in this process alone and little memory.

    Args:
        folder: The checkpoint.
        to: The folder of weights; made if absent.
        prefix: Take tensors whose names begin with this, and leave it out of their names.
        max_bytes: How large a file gets.

    Raises:
        CheckpointError: No tensor's name begins so; the checkpoint cannot be used.
        CheckpointException: A slice of it is damaged.
    """
    kinds = {n: k for n, k in catalog_of(folder).kinds.items() if n.startswith(prefix)}
    if not kinds:
        raise CheckpointError(
            "there is nothing to take", path=str(folder), seen=f"no tensor begins with {prefix!r}"
        )
    make(to)
    files = _Files(to, {n.removeprefix(prefix): k for n, k in kinds.items()}, {}, max_bytes)
    files.make()
    state = {prefix + name: tensor for name, tensor in files.tensors().items()}
    load_from(folder, cast(dict[str, Any], state), Ranks(None, alone=True), False)
    files.flush()
    files.publish()
