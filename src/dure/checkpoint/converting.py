"""`convert`: a checkpoint of one form as one of another, slice by slice.

A source becomes a `Taken`, as if this process had it in memory: names, kinds and slices, whose
elements are read when they are written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import NAME, catalog_of
from dure.checkpoint.contents import Catalog, leaves_of
from dure.checkpoint.format_utils import read_torch_file, write_torch_file
from dure.checkpoint.fsspec_path import AnyPath, local_path, path_of
from dure.checkpoint.metadata import TensorStorageMetadata
from dure.checkpoint.objects import own_state
from dure.checkpoint.plan_items import box_of
from dure.checkpoint.planning import Offer
from dure.checkpoint.reading import Mapped
from dure.checkpoint.restoring import Read, read_slices
from dure.checkpoint.saving import OnDemand, Taken, save_into, take
from dure.checkpoint.slice_files import Slice, kind_of
from dure.checkpoint.slices import Box, full_box
from dure.checkpoint.torch_folder import TorchFolder, is_torch_folder
from dure.checkpoint.torch_writing import write_torch_folder
from dure.checkpoint.tree import decode, encode
from dure.checkpoint.weight_folder import MAX_FILE_BYTES, save_weights
from dure.checkpoint.weight_reading import catalog_of_weights, has_weights
from dure.errors import CheckpointError, UsageError

__all__ = ["FORMATS", "convert"]

Format = Literal["dure", "safetensors", "torch", "distcp"]
FORMATS: tuple[Format, ...] = ("dure", "safetensors", "torch", "distcp")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: Format = "dure",
    *,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint in another form, in this process alone.

    Args:
        source: A folder, or the URL of one, of `save`, of `torch.distributed.checkpoint`, or of
            weights (safetensors); or a local file of `torch.save`. Which of them is found out.
        target: The folder, or with "torch" the file, that is written. With "dure" it may be a URL.
        to: "dure": a folder that `load` reads; "safetensors": a folder of weights as Hugging Face
            stores them, for tensors only; "torch": one file of `torch.save`; "distcp": a folder
            that `torch.distributed.checkpoint` loads, which must have no checkpoint yet.
        overwrite: Whether what is at `target` may be replaced.

    Raises:
        UsageError: `to` is none of these; `target` is taken, or it is a URL and `to` is not "dure";
            values among weights.
        CheckpointError: `source` is none of these, or damaged, or would run code. The target is as
            it was.

    Cost:
        Every byte is read and written once; memory of the largest slice, with "torch" that of all
        tensors that are stored in several slices.

    Example:
        ```python
        from dure.checkpoint import convert

        folder = f"run/converted-{dist.get_rank()}"
        dist.checkpoint.save({"w": torch.ones(4)}, checkpoint_id=f"{folder}/a", no_dist=True)
        convert(f"{folder}/a", f"{folder}/b", to="safetensors")
        ```
    """
    if to not in FORMATS:
        raise UsageError("a checkpoint cannot be written so", seen=f"to={to!r}", fix=f"{FORMATS}")
    source, target = path_of(source), path_of(target)
    local = Path() if to == "dure" else local_path(target, f"a target of form {to!r}")
    taken, alone = _taken_from(source), Ranks(None, alone=True)
    if to == "torch":
        _require_free(target, target.exists() and not overwrite)
        write_torch_file(local, decode(taken.tree, cache(lambda name: _full(taken, name))))
        return
    _require_free(target, is_torch_folder(target))
    if to == "dure":
        _require_free(target, (target / NAME).exists() and not overwrite)
        save_into(target, taken, alone)
    elif to == "safetensors":
        save_weights(local, taken, alone, {}, MAX_FILE_BYTES, overwrite)
    else:
        _require_free(target, (target / NAME).exists())
        write_torch_folder(local, taken, leaves_of(taken.tree))


def _require_free(target: AnyPath, taken: bool) -> None:
    if taken:
        raise UsageError(
            "there is something at the target already",
            seen=str(target),
            fix="Choose another target, or pass overwrite=True (--overwrite); checkpoints of "
            "torch.distributed.checkpoint are never replaced.",
        )


def _taken_from(source: AnyPath) -> Taken:
    """Return what is at a path.

    Raises:
        CheckpointError: Nothing that can be used.
    """
    if source.is_file():
        file = local_path(source, "a file of torch.save")
        state = {key: own_state(value) for key, value in read_torch_file(file).items()}
        return take(state, frozenset())
    if is_torch_folder(source):
        return _taken_from_torch(TorchFolder(source), source)
    if not (source / NAME).exists() and has_weights(source):
        return _taken_from_catalog(source, catalog_of_weights(source))
    return _taken_from_catalog(source, catalog_of(source))


def _taken_from_catalog(folder: AnyPath, catalog: Catalog) -> Taken:
    mapped = Mapped(folder, catalog)
    mapped.open_all()  # before all slices are listed
    stored = dict(one for name in catalog.kinds for one in catalog.parts(name))

    def read(part: Slice) -> torch.Tensor:
        dtype = catalog.kinds[part.name].torch_dtype
        tensor = torch.empty(part.box.sizes, dtype=dtype, device="cpu")
        read_slices(folder, catalog, [Read(part, stored[part], part.box, tensor)], 1, mapped)
        return tensor

    offer: Offer = {n: (k, tuple(catalog.cut(n).boxes()), 0) for n, k in catalog.kinds.items()}
    return Taken(offer, OnDemand(read), catalog.tree)


def _taken_from_torch(theirs: TorchFolder, folder: AnyPath) -> Taken:
    names = theirs.metadata.state_dict_metadata
    offer: Offer = {}
    leaves: dict[str, Any] = {}
    chunks: dict[Slice, Any] = {}
    for name, saved in names.items():
        if not isinstance(saved, TensorStorageMetadata):
            leaves[name] = theirs.value(name)
            continue
        kind = kind_of(torch.empty(saved.size, dtype=saved.properties.dtype, device="meta"))
        if kind is None:
            seen = f"{name} is {saved.properties.dtype}; in {folder}"
            raise CheckpointError("a tensor cannot be in a checkpoint", path=str(folder), seen=seen)
        boxes: list[Box] = [box_of(chunk) for chunk in saved.chunks]
        chunks.update(zip((Slice(name, box) for box in boxes), saved.chunks, strict=True))
        offer[name] = kind, tuple(box for box in boxes if box.num_elements), 0
        leaves[name] = torch.empty((), device="cpu")
    tensors: dict[str, torch.Tensor] = {}
    tree = encode(_nested(leaves, theirs.paths), "", tensors)
    if tensors.keys() != offer.keys():  # both are the keys that lead to a tensor, with dots between
        seen = f"{min(tensors.keys() ^ offer.keys())} is not where its keys lead; in {folder}"
        raise CheckpointError("torch's checkpoint cannot be read", path=str(folder), seen=seen)

    def read(part: Slice) -> torch.Tensor:
        return theirs.slice(part.name, chunks[part]).contiguous()

    return Taken(offer, OnDemand(read), tree)


def _nested(leaves: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return leaves in dicts and lists, as the keys that lead to them say; ints are places."""
    root: dict[Any, Any] = {}
    for name, value in leaves.items():
        path = paths.get(name, (name,))
        place = root
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return cast(dict[str, Any], _with_lists(root))


def _with_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    below = {key: _with_lists(value) for key, value in cast(dict[Any, Any], node).items()}
    places = sorted(key for key in below if isinstance(key, int))
    if below and places == list(range(len(below))):
        return [below[place] for place in places]
    return below


def _full(taken: Taken, name: str) -> torch.Tensor:
    """Return a full tensor."""
    kind, boxes, _ = taken.offer[name]
    full = full_box(kind.shape)
    if boxes == (full,):
        return taken.memory[Slice(name, full)]
    made = torch.empty(kind.shape, dtype=kind.torch_dtype, device="cpu")
    for box in boxes:
        made[box.within(full)] = taken.memory[Slice(name, box)]
    return made
