"""What travels between stages: pytrees, taken apart into tensors and a description of the rest."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dure.errors import UsageError
from dure.tensor.dtensor import DTensor
from dure.tensor.placement_types import Partial, Replicate
from dure.torch_private import pytree
from dure.training.pytrees import tensors_of

__all__ = ["GetMesh", "PackedPytree", "PytreeLayout", "Spread", "TensorLayout", "pack", "unpack"]

GetMesh = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """A DTensor's mesh and placements, which its local part does not have."""

    names: tuple[str, ...] | None
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor without its values; `spread` of one that was a DTensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    spread: Spread | None = None

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class _Other:
    """A leaf that is no tensor: None, a number, a string."""

    pickled: bytes


@dataclass(frozen=True, slots=True)
class PytreeLayout:
    """A pytree without the values of its tensors.

    Attributes:
        tree: Its structure.
        leaves: The kinds of its leaves.
    """

    tree: pytree.TreeSpec
    leaves: tuple[TensorLayout | _Other, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a pytree of numbers: structures of torch's pytrees are not made to be kept."""
        return _layout_of, (pytree.tree_unflatten(range(len(self.leaves)), self.tree), self.leaves)

    @property
    def tensors(self) -> list[TensorLayout]:
        """Its tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorLayout)]


def _layout_of(numbered: Any, leaves: tuple[TensorLayout | _Other, ...]) -> PytreeLayout:
    return PytreeLayout(pytree.tree_flatten(numbered)[1], leaves)


class PackedPytree(NamedTuple):
    """A pytree taken apart: its tensors, of DTensors this rank's parts, and the rest."""

    layout: PytreeLayout
    tensors: list[torch.Tensor]

    def detached(self) -> PackedPytree:
        """Return it with tensors that have no graph; `layout` still says which had one."""
        return PackedPytree(self.layout, [tensor.detach() for tensor in self.tensors])


def pack(value: Any) -> PackedPytree:
    """Take a pytree apart.

    Of a DTensor this rank's part is taken, differentiably: the gradient that comes back is that of
    the part. Pending reductions (Partial) are carried out first, since their parts are no values.

    Collective:
        All ranks of the mesh of a DTensor that is Partial.
    """
    leaves, tree = pytree.tree_flatten(value)
    described: list[TensorLayout | _Other] = []
    tensors: list[torch.Tensor] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            described.append(_Other(_pickled(leaf)))
            continue
        spread, part = None, leaf
        if isinstance(leaf, DTensor):
            placements = [Replicate() if isinstance(p, Partial) else p for p in leaf.placements]
            reduced = leaf.redistribute(placements=placements)
            names, shape = leaf.device_mesh.mesh_dim_names, tuple(leaf.shape)
            spread = Spread(names, tuple(placements), shape, tuple(reduced.stride()))
            part = reduced.to_local(grad_placements=placements)
        described.append(TensorLayout(tuple(part.shape), part.dtype, part.requires_grad, spread))
        tensors.append(part)
    return PackedPytree(PytreeLayout(tree, tuple(described)), tensors)


def _pickled(leaf: object) -> bytes:
    """Return a leaf that is no tensor as bytes.

    Raises:
        UsageError: It has tensors within whose gradients would be lost.
    """
    if any(tensor.requires_grad for tensor in tensors_of(leaf)):
        raise UsageError(
            "a stage returned an object whose class is not registered as a pytree",
            op="pipeline",
            seen=f"a {type(leaf).__qualname__} with tensors that require gradients",
            fix="Return tensors, tuples, lists or dicts; or register the class with "
            "torch.utils._pytree.register_pytree_node (torch.export.register_dataclass).",
        )
    return pickle.dumps(leaf)


def unpack(packed: PackedPytree, get_mesh: GetMesh | None = None) -> Any:
    """Return the pytree.

    Args:
        packed: What `pack` returned, on this rank or another.
        get_mesh: ``get_mesh(axis names, None)`` returns the mesh for parts of DTensors; where None
            they stay parts.
    """
    rest = iter(packed.tensors)
    leaves: list[Any] = []
    for leaf in packed.layout.leaves:
        if isinstance(leaf, _Other):
            leaves.append(pickle.loads(leaf.pickled))
            continue
        tensor, spread = next(rest), leaf.spread
        if spread is not None and get_mesh is not None:
            tensor = DTensor.from_local(
                tensor,
                get_mesh(spread.names, None),
                spread.placements,
                shape=torch.Size(spread.shape),
                stride=spread.stride,
            )
        leaves.append(tensor)
    return pytree.tree_unflatten(leaves, packed.layout.tree)
