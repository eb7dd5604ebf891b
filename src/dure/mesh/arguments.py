"""Arguments of meshes: ranks, names of axes, the device type, options for each axis's group.

Each function raises a `MeshError` that shows what was passed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dure.errors import MeshError

__all__ = [
    "BackendOverride",
    "as_array",
    "check_device_type",
    "check_names",
    "check_ranks",
    "options_by_axis",
]

BackendOverride = str | object | tuple[str, object]
"""A backend's name, its options, or both."""


def as_array(mesh: object) -> torch.Tensor:
    """Return the ranks of a mesh, given as nested lists or a tensor, as an integer tensor."""
    try:
        array = torch.as_tensor(mesh, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise MeshError("mesh must be an array of ranks", seen=f"{mesh!r}: {error}") from None
    if array.is_floating_point() or array.is_complex() or array.numel() == 0:
        raise MeshError("mesh must be an array with at least one rank", seen=f"{mesh!r}")
    return array


def check_ranks(ranks: tuple[int, ...], world_size: int | None, shape: tuple[int, ...]) -> None:
    """Raise unless the ranks are distinct ones of the world; None: of a world of unknown size."""
    if world_size is not None and len(ranks) > world_size:
        raise MeshError(
            "the mesh is larger than the world",
            seen=f"shape {shape} has {len(ranks)} ranks, the world {world_size}",
            fix=f"Start {len(ranks)} ranks, or make the mesh smaller.",
        )
    if len(set(ranks)) < len(ranks):
        twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
        raise MeshError("a rank occurs twice in the mesh", seen=f"ranks {twice}")
    beyond = [r for r in ranks if r < 0 or (world_size is not None and r >= world_size)]
    if beyond:
        raise MeshError("no such rank", seen=f"ranks {beyond} in a world of {world_size}")


def check_names(names: Sequence[str] | None, ndim: int | None) -> tuple[str, ...] | None:
    """Return the axes' names, distinct and one for each axis; None if they have none."""
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(n, str) and n for n in names):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MeshError("mesh_dim_names must be a tuple of names", seen=f"{names!r}")
    if len(set(names)) != len(names):
        raise MeshError("names of axes must be distinct", seen=f"{tuple(names)}")
    if ndim is not None and len(names) != ndim:
        raise MeshError(
            "mesh_dim_names must have one name for each axis",
            seen=f"{tuple(names)} for {ndim} axes",
        )
    return tuple(names)


def check_device_type(device_type: object) -> None:
    """Raise unless it is a word, such as "cpu"."""
    if not isinstance(device_type, str) or not device_type.isalpha():
        raise MeshError(
            "device_type must be a word such as 'cpu' or 'cuda', without an index",
            seen=f"{device_type!r}",
        )


def options_by_axis(
    given: Mapping[int | str, BackendOverride], names: Sequence[str] | Sequence[int]
) -> list[tuple[str | None, object]]:
    """Return (backend, options) for each axis."""
    left: dict[int | str, Any] = dict(given)
    found: list[tuple[str | None, object]] = []
    for number, name in enumerate(names):
        chosen = [left.pop(key) for key in dict.fromkeys((number, name)) if key in left]
        if len(chosen) > 1:
            raise MeshError(f"backend_override names axis {number} twice", seen=f"{name!r} too")
        one = chosen[0] if chosen else None
        pair = (
            one if isinstance(one, tuple) else (one, None) if isinstance(one, str) else (None, one)
        )
        found.append(pair)
    if left:
        raise MeshError("backend_override names no axis", seen=f"{list(left)}, of {list(names)}")
    return found
