"""The mesh axes over which data is parallel: one that shards parameters, and one of replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dure.comm.world import resolve
from dure.errors import MeshError, ModuleError
from dure.layout import Layout
from dure.mesh import DeviceMesh
from dure.parallel.fsdp.policies import DataParallelMeshDims
from dure.tensor.dtensor import DTensor
from dure.tensor.placement_types import Placement, Replicate, Shard, StridedShard
from dure.tensor.spec import DTensorSpec, TensorMeta, spec_of

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["DataAxes"]


@dataclass(frozen=True, slots=True)
class DataAxes:
    """Data-parallel axes, as a mesh of [shard] or of [replicate, shard].

    Attributes:
        mesh: The mesh of these axes.
        root_mesh: The mesh that they were cut from by names, whose other axes are those of DTensor
            parameters; None where parameters bring a mesh of their own.
    """

    mesh: DeviceMesh
    root_mesh: DeviceMesh | None = None

    @classmethod
    def of(
        cls, mesh: DeviceMesh | None, dims: DataParallelMeshDims | None, kind: str = "cpu"
    ) -> DataAxes:
        """Check what `fully_shard` was given; `kind` is the parameters' kind of device.

        Raises:
            MeshError: The value is not a mesh; or it has more than two axes without
                `dp_mesh_dims`, or lacks the axes that these name.
        """
        if mesh is None:
            world = resolve(None, "fully_shard")
            kinds = world.device_types - {"meta"}
            if kind not in kinds:  # for example meta: use the accelerator, as torch does
                has_one = torch.accelerator.is_available()
                kind = min(kinds - {"cpu"}, default="cpu") if has_one else "cpu"
            mesh = DeviceMesh.from_group(world, kind)
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

    def intra_and_inter_node(self, size: int) -> tuple[ProcessGroup, ProcessGroup]:
        """Return this rank and its neighbours, `size` ranks of the shard axis, one after another.

        And the ranks that have this one's place among their neighbours.

        Collective:
            All ranks of the mesh, at the first call.
        """
        axis, mesh = self.mesh.ndim - 1, self.mesh
        layout = mesh._layout.split(axis, (self.size // size, size))  # pyright: ignore[reportPrivateUsage]
        split = mesh._cut(mesh._root, layout, None)  # pyright: ignore[reportPrivateUsage]
        made = slice(axis, axis + 2)
        mesh._open(layout.axes[made], split._kinds(None)[made])  # pyright: ignore[reportPrivateUsage]
        return split.get_group(axis + 1), split.get_group(axis)

    def shard_spec(self, parameter: torch.Tensor, dim: int) -> DTensorSpec:
        """Return how a parameter lies whose dimension `dim` is cut over these axes, last of all.

        Raises:
            ModuleError: It is a DTensor that is divided over one of them already.
        """
        data, inner = self.mesh, parameter.spec if isinstance(parameter, DTensor) else None
        mesh, places = data, list(range(data.ndim))
        placements: list[Placement] = [Replicate()] * data.ndim
        if inner is not None and self.root_mesh is not None and inner.mesh == self.root_mesh:
            names = inner.mesh.mesh_dim_names or ()
            mesh, placements = inner.mesh, list(inner.placements)
            places = [names.index(name) for name in data.mesh_dim_names or ()]
        elif inner is not None:
            mesh = DeviceMesh._concatenate([data, inner.mesh])  # pyright: ignore[reportPrivateUsage]
            placements += inner.placements
        if any(not placements[axis].is_replicate() for axis in places):
            raise ModuleError(
                "the parameter is divided over a data-parallel axis already",
                op="fully_shard",
                seen=f"{placements} of {mesh!r}; {data.mesh_dim_names} are data parallel",
            )
        before = math.prod(
            mesh.size(axis) for axis, each in enumerate(placements) if each.is_shard(dim)
        )
        cut = Shard(dim) if before == 1 else StridedShard(dim, split_factor=before)
        placements[places[-1]] = cut
        strides = torch.empty(parameter.shape, device="meta").stride()
        meta = TensorMeta(parameter.shape, strides, parameter.dtype)
        return spec_of(mesh, tuple(placements), meta)


def _one_axis(mesh: DeviceMesh, names: str | tuple[str, ...] | None) -> str | None:
    """Return the name of the axis, which may be several taken as one."""
    if names is None or isinstance(names, str):
        return names
    if len(names) == 1:
        return names[0]
    flat = "_".join(names)
    mesh[tuple(names)]._flatten(flat)  # pyright: ignore[reportPrivateUsage]
    return flat
