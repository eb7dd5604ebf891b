"""The spec of a DTensor: mesh, placements, and shape, strides and dtype of the full tensor.

*Order of cuts.* If several axes cut one dimension, they cut one after another. The left one cuts
first, unless its placement is a `StridedShard` whose `split_factor` is the number of parts that
later axes make: then it cuts the parts that those have made. So ``(StridedShard(0,
split_factor=2), Shard(0))`` on a mesh of 3 x 2 cuts rows into 2 parts, and each of them into 3.
With any other factor, a `StridedShard` divides the dimension into that many runs and cuts each run.

Specs are interned: equal specs are the same object, so that caches compare them by identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from dure.comm.world import when_left
from dure.errors import DimError, PlacementError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    chunk,
)

__all__ = [
    "DTensorSpec",
    "TensorMeta",
    "as_placements",
    "compute_local_shape_and_global_offset",
    "cuts_of",
    "import_instead_of",
    "mixes_reductions",
    "resolved",
    "spec_of",
]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, strides and dtype of a full tensor.

    Obtained from:
        `DTensorSpec.tensor_meta`.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorMeta:
        """Return those of a tensor."""
        return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)

    def empty(self) -> torch.Tensor:
        """Return a meta tensor with this shape, these strides and this dtype."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    @property
    def overlaps(self) -> bool:
        """Whether elements share memory, as in an expanded tensor."""
        return any(s == 0 and n > 1 for s, n in zip(self.stride, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of one mesh axis through a dimension.

    Attributes:
        axis: The mesh axis.
        runs: The number of runs into which the dimension is divided before each run is cut.
    """

    axis: int
    runs: int = 1


def cuts_of(placements: Sequence[Placement], sizes: Sequence[int], dim: int) -> tuple[Cut, ...]:
    """Return the cuts through a dimension, in the order in which they are made.

    Args:
        placements: One for each axis.
        sizes: Size of each axis.
        dim: The dimension.
    """
    order: list[Cut] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not placement.is_shard(dim):
            continue
        before, made = 0, 1
        runs = placement.split_factor if isinstance(placement, StridedShard) else 1
        while before < len(order) and made < runs:
            made *= sizes[order[before].axis]
            before += 1
        if made == runs:
            order.insert(before, Cut(axis))
        else:
            order.insert(0, Cut(axis, runs))
    return tuple(order)


def runs_of(
    size: int, cuts: Sequence[Cut], sizes: Sequence[int], coordinate: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the indices of a dimension that a rank has, as runs (size, offset)."""
    runs = [(size, 0)]
    for cut in cuts:
        total = sum(length for length, _ in runs)
        taken: list[tuple[int, int]] = []
        for number in range(cut.runs):
            length, offset = chunk(total, cut.runs, number)
            part, inside = chunk(length, sizes[cut.axis], coordinate[cut.axis])
            taken += _slice_runs(runs, offset + inside, part)
        runs = taken
    return [run for run in runs if run[0]] or [(0, runs[0][1] if runs else size)]


def _slice_runs(runs: list[tuple[int, int]], begin: int, length: int) -> list[tuple[int, int]]:
    """Return the `length` indices that follow the first `begin` indices of `runs`."""
    taken: list[tuple[int, int]] = []
    for size, offset in runs:
        low, high = max(begin, 0), min(begin + length, size)
        if low < high:
            if taken and sum(taken[-1]) == offset + low:
                taken[-1] = (taken[-1][0] + high - low, taken[-1][1])
            else:
                taken.append((high - low, offset + low))
        begin -= size
    return taken or [(0, sum(runs[-1]) if runs else 0)]


class DTensorSpec:
    """Mesh, placements, shape, strides and dtype of a DTensor; immutable.

    Args:
        mesh: The mesh.
        placements: One for each mesh axis.
        tensor_meta: Shape, strides and dtype of the full tensor.

    Raises:
        PlacementError: Placements do not fit the tensor or the mesh.
        UsageError: `tensor_meta` is not a TensorMeta.

    Obtained from:
        The specs of `Operation.inputs` and `Operation.outputs`, and `DTensor._spec`.
    """

    __slots__ = (
        "_compact", "_local_shape", "coordinate", "mesh", "meta", "order", "partial", "placements",
    )  # fmt: skip

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    meta: TensorMeta
    coordinate: tuple[int, ...] | None
    partial: bool
    order: tuple[int, ...] | None
    _local_shape: torch.Size | None
    _compact: DTensorSpec | None

    def __new__(
        cls, mesh: DeviceMesh, placements: Sequence[Placement], tensor_meta: TensorMeta
    ) -> DTensorSpec:
        """Return the interned spec of these values."""
        if not isinstance(tensor_meta, TensorMeta):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                "tensor_meta must be a TensorMeta", op="DTensorSpec", seen=repr(tensor_meta)
            )
        shape, dtype = torch.Size(tensor_meta.shape), tensor_meta.dtype
        given = as_placements(placements, mesh, len(shape), "DTensorSpec", dtype)
        return spec_of(mesh, given, TensorMeta(shape, tuple(tensor_meta.stride), dtype))

    @property
    def tensor_meta(self) -> TensorMeta:
        """Shape, strides and dtype of the full tensor, under torch's name."""
        return self.meta

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of the full tensor."""
        return self.meta.stride

    @property
    def shape(self) -> torch.Size:
        """Shape of the full tensor."""
        return self.meta.shape

    @property
    def ndim(self) -> int:
        """Dimensions of the tensor."""
        return len(self.meta.shape)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh, under torch's name."""
        return self.mesh

    @property
    def dim_map(self) -> list[int]:
        """The mesh axis that cuts each dimension, the last one if several do; -1 if none does."""
        cut = {p.dim: axis for axis, p in enumerate(self.placements) if isinstance(p, Shard)}
        return [cut.get(dim, -1) for dim in range(self.ndim)]

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's part; on a rank outside the mesh [0], or [] if there are no dims."""
        if self._local_shape is None:
            if self.coordinate is None:
                self._local_shape = torch.Size([0] if self.shape else [])
            else:
                sizes = [sum(n for n, _ in self.runs(dim)) for dim in range(self.ndim)]
                self._local_shape = torch.Size(sizes)
        return self._local_shape

    def part_outside(self) -> torch.Tensor:
        """Return the empty placeholder that ranks outside the mesh have as their part."""
        device = self.mesh.device_type
        return torch.zeros(self.local_shape, dtype=self.meta.dtype, device=device)

    def cuts(self, dim: int) -> tuple[Cut, ...]:
        """Return the cuts through a dimension, in their order."""
        return cuts_of(self.placements, self.mesh.shape, dim)

    def runs(self, dim: int, coordinate: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """Return the indices of a dimension that a rank has, as runs (size, offset).

        Args:
            dim: The dimension.
            coordinate: The rank's coordinate in the mesh; if None, this rank's.
        """
        at = self.coordinate if coordinate is None else coordinate
        assert at is not None
        return runs_of(self.shape[dim], self.cuts(dim), self.mesh.shape, at)

    def with_placements(self, placements: Sequence[Placement]) -> DTensorSpec:
        """Return the spec of the same tensor with other placements."""
        return spec_of(self.mesh, tuple(placements), self.meta)

    def permuted(self, order: Sequence[int]) -> DTensorSpec:
        """Return the spec of the tensor with its dimensions in another order."""
        meta = self.meta
        placements = [
            replace(p, dim=order.index(p.dim)) if isinstance(p, Shard) else p
            for p in self.placements
        ]
        shape = torch.Size([meta.shape[dim] for dim in order])
        stride = tuple(meta.stride[dim] for dim in order)
        return spec_of(self.mesh, tuple(placements), TensorMeta(shape, stride, meta.dtype))

    def with_dtype(self, dtype: torch.dtype) -> DTensorSpec:
        """Return the spec of the same tensor with another dtype."""
        meta = TensorMeta(self.meta.shape, self.meta.stride, dtype)
        return spec_of(self.mesh, self.placements, meta)

    def compact(self) -> DTensorSpec:
        """Return the spec with strides without gaps, in the same order.

        A tensor has these strides after its parts were moved or copied.
        """
        if self._compact is None:
            shape, order = self.shape, self.order or range(self.ndim)
            stride, step = [0] * self.ndim, 1
            for dim in reversed(order):
                stride[dim] = step
                step *= max(shape[dim], 1)
            meta = TensorMeta(shape, tuple(stride), self.meta.dtype)
            self._compact = spec_of(self.mesh, self.placements, meta)
        return self._compact

    def without_partial(self) -> DTensorSpec:
        """Return the spec with Replicate in the place of Partial; the gradient's spec, too."""
        if not self.partial:
            return self
        return self.with_placements([Replicate() if p.is_partial() else p for p in self.placements])

    def replicated(self) -> DTensorSpec:
        """Return the spec with Replicate along each axis."""
        return self.with_placements((Replicate(),) * self.mesh.ndim)

    def is_replicated(self) -> bool:
        """Return whether each rank has the full tensor."""
        return all(placement.is_replicate() for placement in self.placements)

    def __repr__(self) -> str:
        return f"Spec({self})"

    def __str__(self) -> str:
        """Return dtype, shape, and placements, such as ``float32[8, 4] (S(0), R)``."""
        dtype = str(self.meta.dtype).removeprefix("torch.")
        placements = ", ".join(map(str, self.placements))
        return f"{dtype}{list(self.shape)} ({placements})"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return spec_of, (self.mesh, self.placements, self.meta)

    def __copy__(self) -> DTensorSpec:
        return self

    def __deepcopy__(self, memo: object) -> DTensorSpec:
        return self


def _memory_order(meta: TensorMeta) -> tuple[int, ...] | None:
    """Return the dimensions by their strides, largest first; None for a row-major tensor."""
    shape, stride = meta.shape, meta.stride
    if 0 in shape or 0 in stride:
        return None
    order = sorted(range(len(shape)), key=lambda d: -stride[d] if shape[d] > 1 else 0)
    long = [dim for dim in order if shape[dim] > 1]
    return None if long == sorted(long) else tuple(order)


_specs: dict[tuple[int, tuple[Placement, ...], TensorMeta], DTensorSpec] = {}
_MOST_SPECS = 1 << 16
when_left.append(_specs.clear)


def _made(mesh: DeviceMesh, placements: tuple[Placement, ...], meta: TensorMeta) -> DTensorSpec:
    spec = object.__new__(DTensorSpec)
    spec.mesh, spec.placements, spec.meta = mesh, placements, meta
    spec.coordinate = mesh.get_coordinate()
    spec.partial = any(placement.is_partial() for placement in placements)
    spec.order = _memory_order(meta)
    spec._local_shape = spec._compact = None  # pyright: ignore[reportPrivateUsage]
    return spec


def spec_of(mesh: DeviceMesh, placements: tuple[Placement, ...], meta: TensorMeta) -> DTensorSpec:
    """Return the interned spec of these values.

    The table is emptied when it is full. After that an equal spec can be another object, which
    costs one more miss in each cache.
    """
    key = (mesh.number, placements, meta)
    spec = _specs.get(key)
    if spec is None:
        if len(_specs) >= _MOST_SPECS:
            _specs.clear()
        spec = _specs[key] = _made(mesh, placements, meta)
    return spec


def as_placements(
    placements: Sequence[Placement] | None,
    mesh: DeviceMesh,
    ndim: int,
    op: str,
    dtype: torch.dtype | None = None,
) -> tuple[Placement, ...]:
    """Check placements that a user passed; None means replicated.

    Args:
        placements: One for each mesh axis.
        mesh: The mesh.
        ndim: Number of the tensor's dimensions.
        op: The calling function, named in errors.
        dtype: The tensor's dtype, to decide which reductions commute.

    Raises:
        PlacementError: Wrong number of placements, a dimension that the tensor does not have, or
            reductions that do not commute.
    """
    if placements is None:
        return (Replicate(),) * mesh.ndim
    is_sequence = type(placements) in (list, tuple) or isinstance(placements, Iterable)  # pyright: ignore
    if isinstance(placements, Placement) or not is_sequence:
        raise PlacementError(
            "placements must be a list, one for each mesh axis",
            op=op,
            seen=f"{placements!r}",
            fix=import_instead_of(placements),
        )
    found = tuple(placements)
    for placement in found:
        if not isinstance(placement, Placement):  # pyright: ignore
            raise PlacementError(
                "placements must be Shard, Replicate or Partial of dure.tensor",
                op=op,
                seen=f"{placement!r}, a {type(placement).__module__}.{type(placement).__name__}",
                fix=import_instead_of(placement),
            )
    if len(found) != mesh.ndim:
        raise PlacementError(
            "placements must have one entry for each mesh axis",
            op=op,
            seen=f"{list(found)} for a mesh of {mesh.ndim} axes",
        )
    if len(found) > 1 and mixes_reductions(found, dtype):
        raise PlacementError(
            "placements must not mix reductions that do not commute", op=op, seen=f"{found}"
        )
    return tuple([resolved(placement, ndim, op) for placement in found])


def import_instead_of(value: object, home: str = "dure.tensor") -> str:
    """Return the advice for an object of torch.distributed that was passed; "" for others."""
    kind = value if isinstance(value, type) else type(value)
    if not kind.__module__.startswith("torch.distributed."):
        return ""
    return f"Import {kind.__name__} from {home} instead of torch.distributed."


def mixes_reductions(placements: Sequence[Placement], dtype: torch.dtype | None) -> bool:
    """Return whether placements have reductions whose order matters; averages truncate integers."""
    found = {p.reduce_op for p in placements if isinstance(p, Partial)}
    exact = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
    return len(found) > 1 and (exact or found != {"sum", "avg"})


def resolved(placement: Placement, ndim: int, op: str) -> Placement:
    """Return a placement of a tensor of `ndim` dimensions with its dimension counted from 0.

    Raises:
        DimError: The tensor does not have that dimension.
    """
    if not isinstance(placement, Shard):
        assert isinstance(placement, (Replicate, Partial))
        return placement
    if not -ndim <= placement.dim < ndim:
        raise DimError(
            "the tensor has no such dimension to shard",
            op=op,
            seen=f"{placement!r} of a tensor of {ndim} dimensions",
        )
    return placement if placement.dim >= 0 else replace(placement, dim=placement.dim % ndim)


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offset of this rank's part of a tensor; torch's name.

    Args:
        global_shape: Shape of the full tensor.
        mesh: The mesh.
        placements: One for each axis.
        skip_offset: Return () in place of the offset.

    Returns:
        The shape, and where the part begins in each dimension.

    Example:
        ```python
        from dure.tensor import Shard, _utils

        mesh = dist.init_device_mesh("cpu", (2,))
        found = _utils.compute_local_shape_and_global_offset((4, 3), mesh, [Shard(0)])
        assert found == ((2, 3), (2 * dist.get_rank(), 0))
        ```
    """
    meta = TensorMeta.of(torch.empty(tuple(global_shape), device="meta"))
    op = "compute_local_shape_and_global_offset"
    spec = spec_of(mesh, as_placements(placements, mesh, len(meta.shape), op), meta)
    if spec.coordinate is None:
        return (0,), ()
    offset = () if skip_offset else tuple(spec.runs(dim)[0][1] for dim in range(spec.ndim))
    return tuple(spec.local_shape), offset
