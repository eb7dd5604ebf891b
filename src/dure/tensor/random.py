"""Random operators: the values of the unsharded run, whatever mesh and placements.

Each rank draws the whole tensor, with the generator that one rank would use, and keeps its part:
values are those of one rank bit for bit, and all generators are left as one rank leaves its own.
That takes the time and, for a moment, the memory of the whole tensor on each rank.

Where only the shape decides what is drawn (`normal_`, dropout's mask), no values are sent; where
values do (probabilities), they are gathered. Ranks that draw from generators in different states
would hold parts of different tensors, and replicas would differ: before each draw the ranks of the
mesh compare a checksum of the states, as a rank may have drawn something by itself in between.

Threads: ranks that are threads of one process share torch's generator. The mesh's first rank reads
its state, and each draws from that, one after another.
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
from dure.errors import Desync, PlacementError
from dure.mesh import DeviceMesh
from dure.tensor.call import Op, schema_of
from dure.tensor.dispatch import special
from dure.tensor.dtensor import DTensor, wrap
from dure.tensor.placement_types import Placement, Replicate
from dure.tensor.redistribute import redistribute
from dure.tensor.spec import TensorMeta, spec_of

__all__ = ["drawn"]

T = TypeVar("T")
aten = torch.ops.aten
R = Replicate()
_turn = threading.Lock()


def drawn(mesh: DeviceMesh, draw: Callable[[], T], generator: torch.Generator | None = None) -> T:
    """Return what `draw` makes, the same on all ranks of a mesh.

    Args:
        mesh: The mesh.
        draw: Draws the whole.
        generator: What it draws from; torch's own where None.

    Raises:
        Desync: On all ranks: their generators are in different states.

    Collective:
        All ranks of the mesh.
    """
    if mesh.get_coordinate() is None:
        return draw()
    if generator is None and is_thread_rank():
        state = _common_state(mesh)
        with _turn:
            torch.default_generator.set_state(state)
            made = draw()
        _meet(mesh)  # who goes on may seed the generator that others still draw from
        return made
    _compare(mesh, torch.default_generator if generator is None else generator)
    return draw()


def _common_state(mesh: DeviceMesh) -> torch.Tensor:
    """Return the state of the shared generator, as the mesh's first rank finds it."""
    _meet(mesh)
    state = torch.default_generator.get_state()
    for axis in range(mesh.ndim):
        mesh.get_group(axis).broadcast(state, 0)
    return state


def _meet(mesh: DeviceMesh) -> None:
    """Wait for all ranks of a mesh."""
    for axis in range(mesh.ndim):
        mesh.get_group(axis).barrier()


def _compare(mesh: DeviceMesh, generator: torch.Generator) -> None:
    """Raise on all ranks of a mesh unless their generators are in the same state.

    Collective: all ranks of the mesh.
    Cost: one all_reduce of 16 bytes for each axis.
    """
    mine = zlib.crc32(generator.get_state().numpy().tobytes())
    groups = [g for g in map(mesh.get_group, range(mesh.ndim)) if g.size() > 1]
    if not groups:
        return
    types = groups[0].device_types
    most = torch.tensor([mine, -mine], device="cpu" if "cpu" in types else min(types))
    for group in groups:
        group.all_reduce(most, ReduceOp.MAX)
    largest, minus_smallest = most.tolist()
    if largest == -minus_smallest:
        return
    states: dict[int, str] = {mesh.get_rank(): f"{mine:08x}"}
    for group in groups:
        found: list[dict[int, str]] = [{} for _ in range(group.size())]
        all_gather_object(found, states, group)
        states = {rank: state for each in found for rank, state in each.items()}
    raise Desync(
        "the ranks' random generators are in different states",
        op="random operator",
        group=groups[0].group_name,
        rank=mesh.get_rank(),
        calls={rank: f"state {state}" for rank, state in states.items()},
        seen="; ".join(f"rank {rank}: state {state}" for rank, state in sorted(states.items())),
        fix="Call torch.manual_seed with one seed on all ranks of the mesh. Draw what only some "
        "ranks need from a torch.Generator of its own, or within torch.random.fork_rng().",
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
"""Operators that look at their operand's shape, strides and dtype only."""
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
    """Run an operator on whole tensors, and keep the parts of what it gave or wrote."""
    schema = schema_of(op)
    named = {**dict(zip(schema.names, args, strict=False)), **kwargs}
    tensors: dict[str, DTensor] = {n: t for n, t in named.items() if isinstance(t, DTensor)}
    for name in schema.mutated:
        if tensors[name].spec.partial:
            raise PlacementError(
                f"{op} cannot write terms of a reduction",
                op=str(op),
                seen=str(tensors[name].spec),
                fix="Redistribute to Replicate() or Shard first.",
            )
    by_shape = op in _BY_SHAPE
    wholes = {n: _blank(t) if by_shape else _whole(t) for n, t in tensors.items()}
    first = next(iter(tensors.values()))
    names = schema.names[: len(args)]
    given = [wholes.get(name, named[name]) for name in names]
    rest = {name: wholes.get(name, value) for name, value in kwargs.items()}
    mesh = first.spec.mesh
    result = drawn(mesh, lambda: op(*given, **rest), named.get("generator"))
    for name in schema.mutated:
        tensors[name].part.copy_(_part(wholes[name], mesh, tensors[name].spec.placements))
    if any(schema.returned):
        return tensors[str(schema.returned[0])]
    results = [_wrapped(one, first) for one in (result if isinstance(result, tuple) else [result])]
    return tuple(results) if isinstance(result, tuple) else results[0]


def _blank(tensor: DTensor) -> torch.Tensor:
    """Return a tensor like the whole, whose values are anything."""
    meta = tensor.spec.meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=tensor.part.device)


def _whole(tensor: DTensor) -> torch.Tensor:
    """Return the whole tensor with the strides of one rank's; it may be written."""
    spec = tensor.spec
    whole = redistribute(tensor.part, spec, spec.with_placements([R] * spec.mesh.ndim))
    return _blank(tensor).copy_(whole) if whole.shape == spec.shape else _blank(tensor)


def _part(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """Return this rank's part of a whole tensor."""
    if mesh.get_coordinate() is None:
        return whole.new_empty(0)
    spec = spec_of(mesh, (R,) * mesh.ndim, TensorMeta.of(whole))
    return redistribute(whole, spec, spec.with_placements(placements))


def _wrapped(whole: torch.Tensor, first: DTensor) -> DTensor:
    """Return a result as a DTensor: cut as the first operand is, if it has its shape."""
    spec = first.spec
    same = whole.shape == spec.shape
    placements = tuple(p if same and not p.is_partial() else R for p in spec.placements)
    part = _part(whole, spec.mesh, placements)
    if part.numel() < whole.numel():
        part = part.clone()  # what it is a part of is freed
    return wrap(part, spec_of(spec.mesh, placements, TensorMeta.of(whole)))
