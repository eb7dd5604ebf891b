"""`DeviceMesh`: the ranks of a job as an array with named axes.

A mesh is a layout (layout.py) over the ranks of its *root* (root.py), the mesh that it was cut
from, and one group for each of its axes. Slicing, flattening, splitting and joining change only the
layout; the groups belong to the root. So sub-meshes cost nothing, and equal sub-meshes of a root
are the same object.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch

from dure import env
from dure.comm.group import ProcessGroup
from dure.comm.init import init_process_group
from dure.comm.subgroups import GroupOptions
from dure.comm.world import current_world
from dure.errors import AxisError, MeshError, NotInGroupError
from dure.layout import Axis, Layout
from dure.mesh.arguments import (
    BackendOverride,
    as_array,
    check_device_type,
    check_names,
    check_ranks,
    options_by_axis,
)
from dure.mesh.picture import draw
from dure.mesh.root import Root, live_roots

__all__ = ["DeviceMesh", "current_mesh", "init_device_mesh", "restore_mesh"]

_current: contextvars.ContextVar[tuple[DeviceMesh, ...]] = contextvars.ContextVar(
    "dure_meshes", default=()
)
_numbers = itertools.count()


def current_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost ``with mesh:`` block; None outside of such blocks."""
    entered = _current.get()
    return entered[-1] if entered else None


class DeviceMesh:
    """The ranks of a job as an array, with a process group along each axis.

    Args:
        device_type: The device of the mesh's tensors: "cpu" or "cuda".
        mesh: Global ranks, as nested lists or an integer tensor. They may be a subset of the world;
            other ranks have no coordinate (`get_coordinate` returns None).
        mesh_dim_names: A name for each axis.
        backend_override: A pair (backend, options) for each axis; None for the world's.
        _init_backend: Whether to create the groups.
        _rank: The global rank of this process; if None, its rank in the default group.

    Raises:
        MeshError: A rank is out of range or occurs twice; invalid, repeated, or a wrong number of
            names; a device type with an index.
        Desync: Ranks passed different meshes (see `new_group`).

    Collective:
        All ranks of the world, in the mesh or not; nothing is sent with ``_init_backend=False``.

    Cost:
        That of one group, for any number of axes: see `new_group`.

    Threads:
        Any. A mesh is immutable, except that `_flatten` adds a name to its root.

    Example:
        ```python
        from dure.device_mesh import DeviceMesh, init_device_mesh

        mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
        assert mesh["tp"].size() == 2 and mesh.get_coordinate() == (0, dist.get_rank())
        ```
    """

    _root: Root
    _layout: Layout
    _names: tuple[str, ...] | None
    _shape: tuple[int, ...]
    _coordinate: tuple[int, ...] | None
    _ranks: tuple[int, ...]
    number: int
    """Unique among the meshes of a process; equal meshes may have different numbers."""

    def __init__(
        self,
        device_type: str,
        mesh: object = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Sequence[tuple[str | None, object]] | None = None,
        _init_backend: bool = True,
        _rank: int | None = None,
    ) -> None:
        check_device_type(device_type)
        if mesh is None:
            raise MeshError("mesh must be passed", fix="Pass ranks, such as mesh=[[0, 1], [2, 3]].")
        array = as_array(mesh)
        names = check_names(mesh_dim_names, array.ndim)
        if _init_backend and current_world().default is None:
            init_process_group()
        rank = current_world().need_default().rank() if _rank is None else _rank
        root = Root(device_type, tuple(array.flatten().tolist()), rank)
        if _init_backend:
            check_ranks(root.ranks, current_world().need_default().size(), tuple(array.shape))
            _choose_device(device_type)
        else:
            check_ranks(root.ranks, None, tuple(array.shape))
        self._settle(root, Layout.row_major(tuple(array.shape)), names)
        root.first = self
        if _init_backend:
            root.find_groups(self._layout.axes, self._kinds(backend_override))
            root.register()

    @staticmethod
    def _cut(root: Root, layout: Layout, names: tuple[str, ...] | None) -> DeviceMesh:
        """Return the mesh of a root with this layout and these names, always the same object."""
        mesh = root.meshes.get((layout, names))
        if mesh is None:
            mesh = DeviceMesh.__new__(DeviceMesh)
            mesh._settle(root, layout, names)
        return mesh

    def _settle(self, root: Root, layout: Layout, names: tuple[str, ...] | None) -> None:
        self._root, self._layout, self._names = root, layout, names
        self._shape = layout.shape
        position = root.position
        first = 0 if position is None else layout.first(position)
        self._ranks = tuple(root.ranks[first + step] for step in layout.positions())
        self._coordinate = None if position is None else layout.coordinate(position)
        self.number = next(_numbers)
        root.meshes[layout, names] = self

    def _kinds(self, overrides: Sequence[tuple[str | None, object]] | None) -> list[GroupOptions]:
        overrides = [(None, None)] * self.ndim if overrides is None else overrides
        if len(overrides) != self.ndim:
            raise MeshError(
                "backend_override must have one entry for each axis",
                seen=f"{len(overrides)} for {self.ndim} axes",
            )
        return [
            GroupOptions(backend=backend, pg_options=options, group_desc=f"mesh_{name}")
            for name, (backend, options) in zip(self._axis_names(), overrides, strict=True)
        ]

    @staticmethod
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: object = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Create a mesh from existing groups.

        Args:
            group: One group for a mesh of one axis, or a list with this rank's group of each axis.
            device_type: As for `DeviceMesh`.
            mesh: The global ranks; required with a list of groups.
            mesh_dim_names: A name for each axis; required with a list of groups.

        Returns:
            The mesh.

        Raises:
            MeshError: A group's ranks are not those along its axis of `mesh`, or an argument is
                missing.

        Cost:
            No communication.

        Example:
            ```python
            world = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("dp",))
            assert world.get_group("dp") is dist.group.WORLD
            ```
        """
        if isinstance(group, ProcessGroup):
            groups = [group]
            mesh = list(group.global_ranks) if mesh is None else mesh
        else:
            groups = list(group)
            if not groups or mesh is None or mesh_dim_names is None:
                raise MeshError("with a list of groups, mesh and mesh_dim_names must be passed")
        made = DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names, _init_backend=False)
        if made.ndim != len(groups):
            raise MeshError(
                "the mesh must have one axis for each group",
                seen=f"{made.ndim} axes and {len(groups)} groups",
            )
        for number, (axis, one) in enumerate(zip(made._layout.axes, groups, strict=True)):
            expected = made._along(axis)
            if one.global_ranks != expected:
                raise MeshError(
                    f"the group of axis {number} has other ranks than the mesh",
                    seen=f"the group has {list(one.global_ranks)}, the mesh "
                    f"{None if expected is None else list(expected)}",
                )
            made._root.groups[axis] = one
        made._root.register()
        return made

    # ---------------------------------------------------------------- attributes

    @property
    def device_type(self) -> str:
        """The device of the mesh's tensors: "cpu" or "cuda"."""
        return self._root.device_type

    @property
    def mesh(self) -> torch.Tensor:
        """The global ranks, an int tensor of the mesh's shape.

        A sub-mesh has a copy for each coordinate on the other axes; this is this rank's copy.

        Raises:
            MeshError: This rank is in no copy of a sub-mesh.
        """
        if self._coordinate is None and self._layout.size < len(self._root.ranks):
            raise MeshError(
                "this rank is in no copy of the sub-mesh",
                seen=f"rank {self._root.rank} is not in {list(self._root.ranks)}",
            )
        return torch.tensor(self._ranks, dtype=torch.int, device="cpu").reshape(self._shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self._shape)

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Name of each axis; None if the axes have no names."""
        return self._names

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks along an axis, or of the mesh.

        Args:
            mesh_dim: Number or name of the axis; if None, the size of the mesh is returned.

        Raises:
            MeshError: No such axis.
        """
        return self._layout.size if mesh_dim is None else self._shape[self._axis(mesh_dim)]

    def get_rank(self) -> int:
        """Return this rank's global rank."""
        return self._root.rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's coordinate on each axis; None if it is not in the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's coordinate on an axis.

        Args:
            mesh_dim: Number or name of the axis; may be None for a mesh of one axis.

        Raises:
            MeshError: No such axis, or None for a mesh of several axes.
            NotInGroupError: This rank is not in the mesh.
        """
        axis = self._only_axis("get_local_rank") if mesh_dim is None else self._axis(mesh_dim)
        return self._inside()[axis]

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return this rank's group along an axis.

        Args:
            mesh_dim: Number or name of an axis, or a name made by `_flatten`; may be None for a
                mesh of one axis.

        Raises:
            MeshError: No such axis, None for a mesh of several axes, or a mesh without groups.
            NotInGroupError: This rank is not in the mesh.
        """
        if isinstance(mesh_dim, str) and mesh_dim in self._flat_names():
            axis = self._root.flattened[mesh_dim]
        elif mesh_dim is None:
            axis = self._layout.axes[self._only_axis("get_group")]
        else:
            axis = self._layout.axes[self._axis(mesh_dim)]
        self._inside()
        group = self._root.groups.get(axis)
        if group is None:
            raise MeshError(
                "this mesh has no process groups",
                seen=f"{self!r}",
                fix="Create it with init_device_mesh(), on all ranks. An unpickled mesh has groups "
                "only if an equal mesh was created before.",
            )
        return group

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return this rank's group along each axis, as `get_group`."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def rank_lists(self) -> list[list[int]]:
        """Return the global ranks of each copy of this sub-mesh."""
        return self._root.rank_lists(self._layout)

    def _inside(self) -> tuple[int, ...]:
        if self._coordinate is None:
            raise NotInGroupError(
                "this rank is not in the mesh",
                rank=self._root.rank,
                seen=f"its ranks are {list(self._root.ranks)}",
                fix="Check get_coordinate() first, which is None on ranks outside the mesh.",
            )
        return self._coordinate

    def _along(self, axis: Axis) -> tuple[int, ...] | None:
        """Return the global ranks on this rank's copy of an axis; None outside of the mesh."""
        root = self._root
        if root.position is None:
            return None
        first = Layout((axis,)).first(root.position)
        return tuple(root.ranks[first + step] for step in axis.positions())

    # ---------------------------------------------------------------- axes

    def _axis_names(self) -> tuple[str, ...]:
        return self._names or tuple(f"dim_{axis}" for axis in range(self.ndim))

    def _only_axis(self, op: str) -> int:
        if self.ndim != 1:
            raise MeshError(
                f"{op} needs mesh_dim for a mesh that does not have exactly one axis",
                seen=f"{self!r}",
                fix=f"Pass mesh_dim: a number below {self.ndim}"
                + (f", or one of {', '.join(self._names)}." if self._names else "."),
            )
        return 0

    def _axis(self, mesh_dim: int | str) -> int:
        """Return the number of an axis from its name or number."""
        error = AxisError
        if isinstance(mesh_dim, str):
            if self._names is not None and mesh_dim in self._names:
                return self._names.index(mesh_dim)
            error = MeshError
        elif -self.ndim <= mesh_dim < self.ndim:
            return mesh_dim % self.ndim
        raise error(f"the mesh has no axis {mesh_dim!r}", seen=f"{self!r}")

    def _flat_names(self) -> list[str]:
        """Return the names made by `_flatten` whose ranks are all in this mesh."""
        own = set(self._layout.positions())
        return [n for n, axis in self._root.flattened.items() if own.issuperset(axis.positions())]

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh of some axes, in the given order, that contains this rank.

        Args:
            mesh_dim_names: Names of axes, or names made by `_flatten`.

        Returns:
            The sub-mesh, the same object for the same names.

        Raises:
            MeshError: No such name, or axes that overlap.
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if self._names is None:
            raise MeshError(
                "a mesh without names cannot be sliced",
                fix="Pass mesh_dim_names when creating it.",
            )
        own = dict(zip(self._names, self._layout.axes, strict=True))
        flat = {name: self._root.flattened[name] for name in self._flat_names()}
        unknown = [name for name in names if name not in own and name not in flat]
        if unknown or not names:
            raise MeshError(
                "the mesh has no such axis",
                seen=f"{mesh_dim_names!r}; it has {', '.join([*own, *flat])}",
            )
        axes = Layout.concatenate(Layout((own.get(name) or flat[name],)) for name in names)
        return self._cut(self._root, axes, check_names(names, None))

    def _flatten(
        self, mesh_dim_name: str | None = None, backend_override: BackendOverride | None = None
    ) -> DeviceMesh:
        """Return a mesh of one axis with all ranks of this one; its name can then slice the root.

        Args:
            mesh_dim_name: The name of the axis; if None, the names of this mesh joined by "_".
            backend_override: Backend, options, or both, of its group.

        Raises:
            MeshError: The name is used for other ranks, or this mesh has no names.

        Collective:
            All ranks of the world, unless the root has a group along these ranks already.
        """
        if self._names is None:
            raise MeshError(
                "a mesh without names cannot be flattened",
                fix="Pass mesh_dim_names when creating it.",
            )
        name = mesh_dim_name or "_".join(self._names)
        root, axis = self._root, self._layout.flatten()
        if self.ndim == 1 and name in self._names:
            return self
        taken = dict(zip(root.first._names or (), root.first._layout.axes, strict=False))
        if name in taken or root.flattened.get(name, axis) != axis:
            raise MeshError(
                f"the name {name!r} is already used",
                seen=f"the root has {', '.join([*taken, *root.flattened])}",
                fix="Pass another mesh_dim_name.",
            )
        flat = self._cut(root, Layout((axis,)), (name,))
        self._open(
            [axis],
            flat._kinds(
                options_by_axis({} if backend_override is None else {0: backend_override}, (name,))
            ),
        )
        root.flattened[name] = axis
        return flat

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Mapping[int | str, BackendOverride] | None = None,
    ) -> DeviceMesh:
        """Return this mesh with one axis split into several, the last running fastest.

        Args:
            dim: The axis, by number or name.
            mesh_sizes: Sizes of the new axes; their product must be the size of the axis.
            mesh_dim_names: Names of the new axes.
            backend_override: By name or number of a new axis, its group's backend, options, or
                both.

        Raises:
            MeshError: The sizes do not fit, or a name is already used.

        Collective:
            All ranks of the world, unless the root already has groups along the new axes.
        """
        axis, parts = self._axis(dim), tuple(mesh_dim_names)
        if self._names is None or len(parts) != len(mesh_sizes):
            raise MeshError(
                "each new axis must have a name, and the mesh must have names",
                seen=f"sizes {tuple(mesh_sizes)}, names {parts}, in {self!r}",
            )
        names = check_names((*self._names[:axis], *parts, *self._names[axis + 1 :]), None)
        split = self._cut(self._root, self._layout.split(axis, mesh_sizes), names)
        made = slice(axis, axis + len(parts))
        overrides = [(None, None)] * axis + options_by_axis(backend_override or {}, parts)
        kinds = split._kinds(overrides + [(None, None)] * (split.ndim - len(overrides)))
        self._open(split._layout.axes[made], kinds[made])
        return split

    def _open(self, axes: Iterable[Axis], kinds: Iterable[GroupOptions]) -> None:
        """Create the groups along axes that have none, if the mesh has groups at all."""
        root = self._root
        wanted = {a: k for a, k in zip(axes, kinds, strict=True) if a not in root.groups}
        if wanted and root.groups:
            root.open_groups(list(wanted), list(wanted.values()))

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        """Join meshes of one root into one with the axes of all, one after another.

        Raises:
            MeshError: The meshes have different roots, axes overlap, or a name occurs twice.
        """
        root = device_mesh_list[0]._root
        if any(mesh._root is not root for mesh in device_mesh_list):
            raise MeshError(
                "only meshes that were cut from one mesh can be joined", seen=f"{device_mesh_list}"
            )
        names = tuple(name for mesh in device_mesh_list for name in mesh._names or ())
        layout = Layout.concatenate(mesh._layout for mesh in device_mesh_list)
        return DeviceMesh._cut(root, layout, check_names(names or None, len(layout.axes)))

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        """Return the meshes along an axis, of all ranks; meshes without this rank have no group."""
        axis = self._layout.axes[self._axis(mesh_dim_name)]
        rank = self.get_rank()
        return [
            self[mesh_dim_name]
            if rank in ranks
            else DeviceMesh(
                self.device_type, ranks, mesh_dim_names=(mesh_dim_name,),
                _init_backend=False, _rank=rank,
            )
            for ranks in self._root.rank_lists(Layout((axis,)))
        ]  # fmt: skip

    def _get_root_mesh(self) -> DeviceMesh:
        """Return the mesh that this one was cut from, or this mesh."""
        return self._root.first

    # ---------------------------------------------------------------- context and value

    def __enter__(self) -> Self:
        """Make this the default mesh of functions with a `device_mesh` argument."""
        _current.set((*_current.get(), self))
        return self

    def __exit__(self, *raised: object) -> None:
        _current.set(_current.get()[:-1])

    def _value(self) -> tuple[object, ...]:
        return (self._root.ranks, self._layout, self._root.device_type, self._names)

    def __eq__(self, other: object) -> bool:
        """Return whether both have the same ranks, shape, names and device type."""
        return self is other or (isinstance(other, DeviceMesh) and self._value() == other._value())

    def __hash__(self) -> int:
        return hash(self._value())

    def __repr__(self) -> str:
        named = (f"{n}={s}" for n, s in zip(self._names or (), self._shape, strict=False))
        shape = f"({', '.join(named)})" if self._names else f"{self._shape}"
        return f"DeviceMesh({shape}, {self.device_type!r}, stride={self._layout.stride})"

    def __str__(self) -> str:
        """Draw the ranks as a grid with the axes' names; this rank has a star."""
        return f"{self!r}\n" + draw(self._ranks, self._shape, self._axis_names(), self._root.rank)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Return the mesh itself: its groups cannot be copied."""
        return self

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        root, first = self._root, self._root.first
        root_value = (root.device_type, root.ranks, first._shape, first._names)
        digits = tuple(axis.digits for axis in self._layout.axes)
        return restore_mesh, (*root_value, digits, self._names)


def restore_mesh(
    device_type: str,
    ranks: tuple[int, ...],
    shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    digits: tuple[tuple[tuple[int, int], ...], ...],
    own_names: tuple[str, ...] | None,
) -> DeviceMesh:
    """Unpickle a mesh, with the groups of this rank's oldest equal root if there is one.

    A function of the module, so that restricted unpicklers can allow it by name.
    """
    array = torch.tensor(ranks, dtype=torch.int, device="cpu").reshape(shape)
    default = current_world().default
    alone = DeviceMesh(
        device_type, array, mesh_dim_names=names, _init_backend=False,
        _rank=-1 if default is None else default.rank(),
    )  # fmt: skip
    root = next((root for root in live_roots() if root.first == alone), alone._root)  # pyright: ignore
    axes = tuple(Axis(axis) for axis in digits)
    return DeviceMesh._cut(root, Layout(axes), own_names)  # pyright: ignore


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, BackendOverride] | None = None,
) -> DeviceMesh:
    """Create a mesh of the ranks from 0, in row-major order; and the default group if needed.

    Args:
        device_type: "cpu" or "cuda", without an index.
        mesh_shape: Size of each axis; their product is at most the number of ranks of the world.
        mesh_dim_names: A name for each axis.
        backend_override: By number or name of an axis: a backend's name, its options, or both.

    Returns:
        The mesh.

    Raises:
        MeshError: The mesh is larger than the world; invalid, repeated, or a wrong number of names;
            an invalid device type or shape.
        Desync: Ranks passed different shapes.

    Collective:
        All ranks of the world, in the mesh or not.

    Cost:
        That of one group, for any number of axes.

    Example:
        ```python
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        total = torch.ones(1)
        dist.all_reduce(total, group=mesh.get_group("tp"))
        assert total.item() == 2.0
        ```
    """
    check_device_type(device_type)
    shape = tuple(mesh_shape)
    if not all(isinstance(size, int) and size > 0 for size in shape):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MeshError("each axis of a mesh must have at least one rank", seen=f"shape {shape}")
    names = check_names(mesh_dim_names, len(shape))
    overrides = None
    if backend_override is not None:
        overrides = options_by_axis(backend_override, names or range(len(shape)))
    ranks = torch.arange(Layout.row_major(shape).size, device="cpu").reshape(shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, backend_override=overrides)


def _choose_device(device_type: str) -> None:
    """Bind this process to the device of its number on the host, unless the program has chosen."""
    module: Any = getattr(torch, device_type, None)  # torch.cuda and modules like it
    if any(not hasattr(module, name) for name in ("is_initialized", "set_device")):
        return  # the CPU, for example
    if module.is_available() and not module.is_initialized():
        local_rank = env.text("LOCAL_RANK")
        if local_rank is not None:
            module.set_device(int(local_rank) % module.device_count())
