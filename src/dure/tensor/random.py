"""Random operators: the values of the unsharded run, on every mesh and with all placements.

Each rank draws the full tensor from the generator that an unsharded run would use, and keeps its
part. So values equal those of one rank bit for bit, and all generators end in the same state. The
cost is the time and, temporarily, the memory of the full tensor on each rank.

If the random values depend only on the shape (`normal_`, dropout's mask), nothing is sent; if they
depend on an operand's values (probabilities), the operand is gathered.

Ranks with different parts of a tensor may draw from generators in different states, for instance
with a seed per rank for data: the parts are random, but not those of the unsharded run. Replicas
must not differ, though. So before a draw whose result is replicated along an axis of the mesh, the
ranks along that axis compare a checksum of their generators' states.

Threads:
    Ranks that are threads of one process share torch's generator. The first rank of the mesh reads
    its state, and the ranks draw from that state one after another.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from dure.comm.objects import all_gather_object
from dure.comm.ops import ReduceOp
from dure.comm.world import is_thread_rank
from dure.errors import Desync, NotInGroupError, PlacementError
from dure.mesh import DeviceMesh
from dure.tensor.call import Op, schema_of
from dure.tensor.dispatch import special
from dure.tensor.dtensor import DTensor
from dure.tensor.placement_types import Placement, Replicate
from dure.tensor.redistribute import redistribute
from dure.tensor.spec import TensorMeta, spec_of
from dure.tensor.wrapping import wrap

__all__ = ["drawn", "is_rng_supported_mesh", "manual_seed"]

T = TypeVar("T")
aten = torch.ops.aten
R = Replicate()
_generator_lock = threading.Lock()


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seed torch's generators, from which random operators on DTensors draw; torch's name.

    Args:
        seed: The seed. Ranks along an axis that replicates tensors need the same seed.
        device_mesh: A mesh that contains this rank.

    Raises:
        NotInGroupError: This rank is not in the mesh.

    Example:
        ```python
        from dure.tensor import Shard, _random, rand

        mesh = dist.init_device_mesh("cpu", (2,))
        _random.manual_seed(7, mesh)
        x = rand(4, device_mesh=mesh, placements=[Shard(0)])
        _random.manual_seed(7, mesh)
        assert torch.equal(x.full_tensor(), torch.rand(4))
        ```
    """
    if device_mesh.get_coordinate() is None:
        raise NotInGroupError(
            "this rank is not in the mesh", op="manual_seed", seen=f"{device_mesh!r}"
        )
    torch.manual_seed(seed)


def is_rng_supported_mesh(device_mesh: DeviceMesh) -> bool:
    """Return True: random operators on DTensors work on every device; torch's name.

    Args:
        device_mesh: Any mesh.

    Returns:
        True.

    Example:
        ```python
        assert _random.is_rng_supported_mesh(mesh)
        ```
    """
    return True


def drawn(
    mesh: DeviceMesh,
    draw: Callable[[], T],
    generator: torch.Generator | None = None,
    *,
    equal_along: Sequence[int],
) -> T:
    """Return the result of `draw`, after a check of the generators' states.

    Args:
        mesh: The mesh.
        draw: Draws the full tensor.
        generator: The generator that it uses; torch's default generator if None.
        equal_along: Axes of the mesh along which all ranks must draw the same values.

    Raises:
        Desync: On all ranks, if generators are in different states along such an axis.

    Collective:
        All ranks of the mesh.
    """
    if mesh.get_coordinate() is None:
        return draw()
    if generator is None and is_thread_rank():
        state = _common_state(mesh)
        with _generator_lock:
            torch.default_generator.set_state(state)
            made = draw()
        _barrier(mesh)  # after it, a rank may seed the generator that others still used before
        return made
    _compare(mesh, torch.default_generator if generator is None else generator, equal_along)
    return draw()


def _common_state(mesh: DeviceMesh) -> torch.Tensor:
    """Return the state of the shared generator, as the first rank of the mesh reads it."""
    _barrier(mesh)
    state = torch.default_generator.get_state()
    for axis in range(mesh.ndim):
        mesh.get_group(axis).broadcast(state, 0)
    return state


def _barrier(mesh: DeviceMesh) -> None:
    """Wait for all ranks of a mesh."""
    for axis in range(mesh.ndim):
        mesh.get_group(axis).barrier()


def _compare(mesh: DeviceMesh, generator: torch.Generator, axes: Sequence[int]) -> None:
    """Raise on all ranks of a mesh if generators are in different states along some axes.

    Collective:
        All ranks of the mesh.

    Cost:
        One all_reduce of 16 bytes for each axis; none without `axes`.
    """
    groups = {axis: mesh.get_group(axis) for axis in range(mesh.ndim)}
    groups = {axis: group for axis, group in groups.items() if group.size() > 1}
    compared = [group for axis, group in groups.items() if axis in axes]
    if not compared:
        return
    mine = zlib.crc32(generator.get_state().numpy().tobytes())
    types = compared[0].device_types
    most = torch.tensor([mine, -mine], device="cpu" if "cpu" in types else min(types))
    for group in compared:
        group.all_reduce(most, ReduceOp.MAX)
    most = most.sum()  # 0 where all are the same
    for axis, group in groups.items():
        if axis not in axes:
            group.all_reduce(most, ReduceOp.MAX)
    if not most.item():
        return
    states: dict[int, str] = {mesh.get_rank(): f"{mine:08x}"}
    for group in groups.values():
        found: list[dict[int, str]] = [{} for _ in range(group.size())]
        all_gather_object(found, states, group)
        states = {rank: state for each in found for rank, state in each.items()}
    names = mesh.mesh_dim_names or range(mesh.ndim)
    along = ", ".join(str(names[axis]) for axis in axes)
    raise Desync(
        "the ranks' random generators are in different states",
        op="random operator",
        group=compared[0].group_name,
        rank=mesh.get_rank(),
        calls={rank: f"state {state}" for rank, state in states.items()},
        seen="; ".join(f"rank {rank}: state {state}" for rank, state in sorted(states.items())),
        fix=f"The result is replicated along the mesh's axis {along}: call torch.manual_seed with "
        "the same seed on the ranks along it. Draw values that only some ranks need from a "
        "separate torch.Generator, or within torch.random.fork_rng().",
    )


_BY_SHAPE: tuple[Op, ...] = (
    aten.uniform_.default, aten.normal_.default, aten.bernoulli_.float, aten.exponential_.default,
    aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default,
    aten.random_.default, getattr(aten.random_, "from"), aten.random_.to,
    aten.rand_like.default, aten.rand_like.generator,
    aten.randn_like.default, aten.randn_like.generator,
    aten.randint_like.default, aten.randint_like.generator,
    aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype,
    aten.bernoulli.p,
)  # fmt: skip
"""Operators that read only the shape, strides and dtype of their operand."""
_BY_VALUES: tuple[Op, ...] = (
    aten.bernoulli.default, aten.bernoulli.Tensor, aten.bernoulli_.Tensor, aten.poisson.default,
    aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor,
    aten.multinomial.default, aten.binomial.default, aten._standard_gamma.default,
    aten._sample_dirichlet.default, aten.native_dropout.default,
    aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default,
    aten.randint_like.Tensor, aten.randint_like.Tensor_generator,
)  # fmt: skip


@special(*_BY_SHAPE, *_BY_VALUES)
def _run(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on full tensors; keep the parts of results and of written operands."""
    schema = schema_of(op)
    named = {**dict(zip(schema.names, args, strict=False)), **kwargs}
    tensors: dict[str, DTensor] = {n: t for n, t in named.items() if isinstance(t, DTensor)}
    for name in schema.mutated:
        if tensors[name].spec.partial:
            raise PlacementError(
                f"{op} cannot write a Partial tensor",
                op=str(op),
                seen=str(tensors[name].spec),
                fix="Redistribute it to Replicate() or Shard() first.",
            )
    by_shape = op in _BY_SHAPE
    full = {n: _empty_full(t) if by_shape else _gathered(t) for n, t in tensors.items()}
    first = next(iter(tensors.values()))
    names = schema.names[: len(args)]
    given = [full.get(name, named[name]) for name in names]
    rest = {name: full.get(name, value) for name, value in kwargs.items()}
    mesh = first.spec.mesh
    written = [tensors[name].spec.placements for name in schema.mutated]
    if None in schema.returned:
        written.append(_placements_of(op, list(tensors.values())))
    equal_along = [i for i in range(mesh.ndim) if any(not p[i].is_shard() for p in written)]
    result = drawn(
        mesh, lambda: op(*given, **rest), named.get("generator"), equal_along=equal_along
    )
    for name in schema.mutated:
        tensors[name].part.copy_(_part(full[name], mesh, tensors[name].spec.placements))
    if any(schema.returned):
        return tensors[str(schema.returned[0])]
    results = [_wrapped(one, first) for one in (result if isinstance(result, tuple) else [result])]
    return tuple(results) if isinstance(result, tuple) else results[0]


def _placements_of(op: Op, tensors: Sequence[DTensor]) -> tuple[Placement, ...]:
    """Return the placements of an operator's results: those of its first operand, or replicated."""
    spec = tensors[0].spec
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    same = op is not aten.multinomial.default and shape == spec.shape
    return tuple(p if same and not p.is_partial() else R for p in spec.placements)


def _empty_full(tensor: DTensor) -> torch.Tensor:
    """Return a tensor with shape and strides of the full tensor, uninitialized."""
    meta = tensor.spec.meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=tensor.part.device)


def _gathered(tensor: DTensor) -> torch.Tensor:
    """Return the full tensor with the strides of the spec, in memory that may be written."""
    spec = tensor.spec
    full = redistribute(tensor.part, spec, spec.replicated())
    return _empty_full(tensor).copy_(full) if full.shape == spec.shape else _empty_full(tensor)


def _part(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """Return this rank's part of a full tensor."""
    if mesh.get_coordinate() is None:
        return full.new_empty(0)
    spec = spec_of(mesh, (R,) * mesh.ndim, TensorMeta.of(full))
    return redistribute(full, spec, spec.with_placements(placements))


def _wrapped(full: torch.Tensor, first: DTensor) -> DTensor:
    """Return a result as a DTensor: sharded as the first operand, if it has its shape."""
    spec = first.spec
    same = full.shape == spec.shape
    placements = tuple(p if same and not p.is_partial() else R for p in spec.placements)
    part = _part(full, spec.mesh, placements)
    if part.numel() < full.numel():
        part = part.clone()  # a view would keep the full tensor alive
    return wrap(part, spec_of(spec.mesh, placements, TensorMeta.of(full)))
