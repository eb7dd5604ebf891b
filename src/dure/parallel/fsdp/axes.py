"""The mesh axes over which data is parallel: one that shards parameters, and one of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.comm.world import resolve
from dure.errors import MeshError
from dure.layout import Layout
from dure.mesh import DeviceMesh
from dure.parallel.fsdp.policies import DataParallelMeshDims
from dure.tensor.placement_types import Placement, Replicate, Shard, StridedShard

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["DataAxes"]


@dataclass(frozen=True, slots=True)
class DataAxes:
    """Data-parallel axes, as a mesh of [shard] or of [replicate, shard].

    Attributes:
        mesh: The mesh of these axes.
        whole: The mesh that they were cut from by names, whose other axes are those of DTensor
            parameters; None where parameters bring a mesh of their own.
    """

    mesh: DeviceMesh
    whole: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh | None, dims: DataParallelMeshDims | None) -> DataAxes:
        """Check what `fully_shard` was given.

        Raises:
            MeshError: What is no mesh, or has more than two axes without `dp_mesh_dims`, or lacks
                these.
        """
        if mesh is None:
            mesh = DeviceMesh.from_group(resolve(None, "fully_shard"), "cpu")
        if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MeshError(
                "mesh is no DeviceMesh",
                op="fully_shard",
                seen=repr(mesh),
                fix="Make one with init_device_mesh; one axis of it is mesh['dp'].",
            )
        if dims is None:
            if mesh.ndim not in (1, 2):
                raise MeshError(
                    "parameters are sharded over a mesh of one axis, or of two: replicas, shards",
                    op="fully_shard",
                    seen=f"{mesh!r}",
                    fix="Pass the data-parallel part, such as mesh['replicate', 'shard']; or name "
                    "it: dp_mesh_dims=DataParallelMeshDims(shard=...).",
                )
            return cls(mesh)
        shard, replicate = (_one_axis(mesh, d) for d in (dims.shard, dims.replicate))
        if shard is None:
            raise MeshError("dp_mesh_dims names no axis to shard over", op="fully_shard")
        return cls(mesh[shard] if replicate is None else mesh[replicate, shard], mesh)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The axis that shards parameters, as a mesh."""
        axis, mesh = self.mesh.ndim - 1, self.mesh
        layout = Layout(mesh._layout.axes[axis:])  # pyright: ignore[reportPrivateUsage]
        names = mesh.mesh_dim_names
        return mesh._cut(mesh._root, layout, None if names is None else names[axis:])  # pyright: ignore[reportPrivateUsage]

    @property
    def shard_group(self) -> ProcessGroup:
        """The ranks that have one parameter's parts between them."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def replicate_group(self) -> ProcessGroup | None:
        """The ranks that have the same part; None without such an axis."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    @property
    def size(self) -> int:
        """Ranks that parameters are sharded over."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    def near_group(self, size: int) -> ProcessGroup:
        """Return this rank and its neighbours: `size` ranks of the shard axis, one after another.

        Collective: all ranks of the mesh, at the first call.
        """
        return self.near_and_far(size)[0]

    def near_and_far(self, size: int) -> tuple[ProcessGroup, ProcessGroup]:
        """Return the same, and the ranks that have this one's place among their neighbours."""
        axis, mesh = self.mesh.ndim - 1, self.mesh
        layout = mesh._layout.split(axis, (self.size // size, size))  # pyright: ignore[reportPrivateUsage]
        split = mesh._cut(mesh._root, layout, None)  # pyright: ignore[reportPrivateUsage]
        made = slice(axis, axis + 2)
        mesh._open(layout.axes[made], split._kinds(None)[made])  # pyright: ignore[reportPrivateUsage]
        return split.get_group(axis + 1), split.get_group(axis)

    def placements(
        self, dim: int, inner: Sequence[Placement], sizes: Sequence[int]
    ) -> list[Placement]:
        """Return how a parameter lies over these axes, whose dimension `dim` they cut.

        Args:
            dim: The dimension.
            inner: Placements over the axes that cut it before (tensor parallel).
            sizes: Sizes of those axes.
        """
        before = 1
        for placement, size in zip(inner, sizes, strict=True):
            if placement.is_shard(dim):
                before *= size
        cut = Shard(dim) if before == 1 else StridedShard(dim, split_factor=before)
        return [cut] if self.mesh.ndim == 1 else [Replicate(), cut]


def _one_axis(mesh: DeviceMesh, names: str | tuple[str, ...] | None) -> str | None:
    """Return the name of the axis, which may be several taken as one."""
    if names is None or isinstance(names, str):
        return names
    if len(names) == 1:
        return names[0]
    flat = "_".join(names)
    mesh[tuple(names)]._flatten(flat)  # pyright: ignore[reportPrivateUsage]
    return flat
