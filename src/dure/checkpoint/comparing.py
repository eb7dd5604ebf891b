"""Is a checkpoint whole, and how do two differ: for a person who asks, in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import Catalog
from dure.checkpoint.restoring import catalog_of, load_from
from dure.checkpoint.slice_files import SliceFile
from dure.errors import CheckpointError

__all__ = ["differences", "faults"]


def faults(folder: Path, catalog: Catalog) -> list[str]:
    """Read every byte and return what is not as it was written.

    Cost: one pass over the bytes; memory: one slice.
    """
    found: list[str] = []
    for name, layout in catalog.layouts.items():
        try:
            file = SliceFile(folder / name, layout)
        except CheckpointError as e:
            found.append(e.seen)
            continue
        try:
            for part in layout.begins:
                dtype = catalog.kinds[part.name].torch_dtype
                wanted = catalog.slices[part.name][part.box].crc32c
                try:
                    file.read(
                        part, wanted, dtype, part.box, torch.empty(part.box.sizes, dtype=dtype)
                    )
                except CheckpointError as e:
                    found.append(e.seen)
        finally:
            file.close()
    return found


def differences(first: Path, second: Path) -> list[str]:
    """Return how the second checkpoint differs from the first: names, kinds, values, elements.

    Tensors that are cut alike and have the same checksums are taken to be the same; of others the
    elements are compared.

    Raises:
        CheckpointError: One cannot be used.
        CheckpointException: One is damaged.

    Cost: memory of the largest tensor twice.
    """
    a, b = catalog_of(first), catalog_of(second)
    names = [catalog.kinds.keys() | catalog.values.keys() for catalog in (a, b)]
    found = [f"{name} is in the first only" for name in sorted(names[0] - names[1])]
    found += [f"{name} is in the second only" for name in sorted(names[1] - names[0])]
    for name in sorted(names[0] & names[1]):
        one, other = a.kinds.get(name), b.kinds.get(name)
        if one != other:
            found.append(f"{name} is {one or 'a value'}, and {other or 'a value'}")
        elif one is None:
            if a.values[name] != b.values[name]:
                found.append(f"{name} is {a.values[name]!r:.60}, and {b.values[name]!r:.60}")
        elif _sums(a, name) != _sums(b, name):
            count = int((_whole(first, a, name) != _whole(second, b, name)).sum())
            if count:
                found.append(
                    f"{name} differs in {count} of {torch.Size(one.shape).numel()} elements"
                )
    return found


def _sums(catalog: Catalog, name: str) -> dict[object, int | None]:
    return {box: stored.crc32c for box, stored in catalog.slices[name].items()}


def _whole(folder: Path, catalog: Catalog, name: str) -> torch.Tensor:
    kind = catalog.kinds[name]
    tensor = torch.empty(kind.shape, dtype=kind.torch_dtype)
    load_from(folder, {name: tensor}, Ranks(None, alone=True), False, lambda _: catalog)
    return tensor
