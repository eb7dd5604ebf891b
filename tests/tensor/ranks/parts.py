"""Who has which part of a DTensor: cut from full tensors, and compared with full tensors.

Parts are cut by `torch.chunk`, in the order that src/dure/tensor/spec.py documents ("Order of
cuts"), and Partial ones are made by arithmetic. Nothing here communicates or asks the library for
sizes and offsets: a test collects the parts of all ranks (thread-ranks share a process, a
`ProcessPool` returns them) and `fault_of` compares them with the parts of the expected tensor.
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportReturnType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dure.tensor import DTensor, Partial, Placement, Replicate, Shard
from dure.tensor.placement_types import StridedShard

REDUCTIONS = ("sum", "avg", "min", "max", "product")


def commute(placements: Sequence[Placement]) -> bool:
    """Tell whether several axes may be reduced in any order: others are refused."""
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return len(ops) < 2 or ops == {"sum", "avg"}


def coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the coordinate of each rank of a mesh."""
    return list(itertools.product(*map(range, sizes)))


# ---- cutting -------------------------------------------------------------------------------------


def order_of_cuts(
    placements: Sequence[Placement], sizes: Sequence[int], dim: int
) -> list[tuple[int, int]]:
    """Return the axes that cut a dimension in their order, each with the runs that it cuts."""
    order: list[tuple[int, int]] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not isinstance(placement, Shard) or placement.dim != dim:
            continue
        runs = placement.split_factor if isinstance(placement, StridedShard) else 1
        made = [math.prod(sizes[a] for a, _ in order[:count]) for count in range(len(order) + 1)]
        if runs in made:
            order.insert(made.index(runs), (axis, 1))
        else:
            order.insert(0, (axis, runs))
    return order


def part_of(
    full: torch.Tensor,
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> torch.Tensor:
    """Return a rank's part of a full tensor, in memory of its own."""
    part = full.detach()
    for dim in range(full.ndim):
        for axis, runs in order_of_cuts(placements, sizes, dim):
            part = torch.cat(
                [_chunk(run, sizes[axis], coordinate[axis], dim) for run in part.chunk(runs, dim)],
                dim,
            )
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            part = _term_of(part, placement.reduce_op, sizes[axis], coordinate[axis])
    return part.clone()


def _chunk(tensor: torch.Tensor, n: int, index: int, dim: int) -> torch.Tensor:
    chunks = tensor.chunk(n, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def _term_of(full: torch.Tensor, op: str, n: int, index: int) -> torch.Tensor:
    """Return a rank's term of a reduction that gives `full`; no term equals it."""
    count = torch.arange(full.numel()).reshape(full.shape)
    other = ((count * 7) % 5 + 1).to(full.dtype)
    if op == "sum":
        return full - other * (n - 1) if index == 0 else other
    if op == "avg":
        return full * n - other * (n - 1) if index == 0 else other
    if op == "product":
        return full * 0.5 ** (n - 1) if index == 0 else torch.full_like(full, 2.0)
    chosen = count % n == index
    return torch.where(chosen, full, full - other if op == "max" else full + other)


def made(
    mesh: Any, full: torch.Tensor, placements: Sequence[Placement], order: str = "rows"
) -> DTensor:
    """Make a DTensor of a full tensor, with parts that are stored in one of `ORDERS`."""
    part = ORDERS[order](part_of(full, placements, mesh.shape, mesh.get_coordinate()))
    stride = torch.empty_like(full, device="meta").stride()
    made = DTensor.from_local(part, mesh, placements, shape=full.shape, stride=stride)
    return made.requires_grad_(full.requires_grad)


def _stored(tensor: torch.Tensor, order: Sequence[int], step: int = 1) -> torch.Tensor:
    """Return a copy whose dimensions are stored in this order, the last one with this step."""
    stride = [0] * tensor.ndim
    for dim in reversed(order):
        stride[dim] = step
        step *= max(tensor.shape[dim], 1)
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def _last_two_swapped(ndim: int) -> list[int]:
    return [*range(ndim - 2), *reversed(range(max(ndim - 2, 0), ndim))]


ORDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor.clone(),
    "rows": lambda tensor: _stored(tensor, range(tensor.ndim)),
    "columns": lambda tensor: _stored(tensor, [*reversed(range(tensor.ndim))]),
    "last two swapped": lambda tensor: _stored(tensor, _last_two_swapped(tensor.ndim)),
    "gaps": lambda tensor: _stored(tensor, range(tensor.ndim), step=2),
}
"""Ways to store a tensor: each returns one of the same values, in memory that no other one has."""


# ---- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a DTensor, and what the DTensor claims to be."""

    local: torch.Tensor
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def claims(self) -> tuple[object, ...]:
        """What must be the same on all ranks."""
        return self.placements, self.shape, self.stride, self.dtype


def part(value: Any) -> Any:
    """Return the `Part` of a DTensor; anything else as it is, without its gradient."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            local = value.to_local()
        return Part(local, value.placements, value.shape, value.stride(), value.dtype)
    return value.detach() if isinstance(value, torch.Tensor) else value


_REDUCE = {
    "sum": lambda t: t.sum(0, dtype=t.dtype),
    "avg": lambda t: t.mean(0),
    "min": lambda t: t.amin(0),
    "max": lambda t: t.amax(0),
    "product": lambda t: t.prod(0, dtype=t.dtype),
}


def _reduced(
    locals_: Sequence[torch.Tensor], placements: Sequence[Placement], sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Return each rank's part after all axes with a Partial are reduced."""
    found = list(locals_)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            reduce, ranks = _REDUCE[placement.reduce_op], coordinates(sizes)
            found = [
                reduce(
                    torch.stack([
                        found[other]
                        for other, there in enumerate(ranks)
                        if there[:axis] + there[axis + 1 :] == here[:axis] + here[axis + 1 :]
                    ])
                )
                for here in ranks
            ]  # fmt: skip
    return found


def fault_of(
    parts: Sequence[Any],
    expected: Any,
    sizes: Sequence[int],
    *,
    exact: bool = True,
    tolerance: float | None = None,
) -> str | None:
    """Return what is wrong with a result; None if it is the expected one on every rank.

    Args:
        parts: What each rank has: a `Part`, or a plain value, which must be the full one.
        expected: The unsharded result.
        sizes: Sizes of the mesh.
        exact: Whether values are compared: they are neither random nor uninitialized.
        tolerance: How much floats may differ, absolutely or of the value; by dtype where None.
    """
    first = parts[0]
    if not isinstance(first, Part):
        found = (difference(one, expected, exact, tolerance) for one in parts)
        return next((fault for fault in found if fault is not None), None)
    if any(not isinstance(one, Part) or one.claims != first.claims for one in parts):
        return f"ranks differ: {[getattr(one, 'claims', one) for one in parts]}"
    if not isinstance(expected, torch.Tensor):
        return f"a DTensor for {expected!r}"
    if (first.shape, first.dtype) != (expected.shape, expected.dtype):
        return _kinds(first, expected)
    if exact and all(n > 1 for n in first.shape) and first.stride != expected.stride():
        return f"strides {first.stride} for {expected.stride()}"
    placements = [Replicate() if isinstance(p, Partial) else p for p in first.placements]
    rights = [part_of(expected, placements, sizes, at) for at in coordinates(sizes)]
    for one, right in zip(parts, rights, strict=True):
        if (one.local.shape, one.local.dtype) != (right.shape, right.dtype):
            return f"part {_kinds(one.local, right)} of {first.placements}"
    for got, right in zip(_reduced([p.local for p in parts], first.placements, sizes), rights,
                          strict=True):  # fmt: skip
        if fault := difference(got, right, exact, tolerance):
            return f"{fault}, placed {first.placements}"
    return None


def _kinds(got: Any, expected: torch.Tensor) -> str:
    return f"{got.dtype} {list(got.shape)} for {expected.dtype} {list(expected.shape)}"


_TOLERANCES = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float16: 2e-2,
               torch.bfloat16: 2e-2}  # fmt: skip


def difference(
    got: Any, expected: Any, exact: bool = True, tolerance: float | None = None
) -> str | None:
    """Return how two plain results differ; None if they do not. See `fault_of`."""
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if isinstance(got, torch.Tensor) or isinstance(expected, torch.Tensor):
            return f"{type(got).__name__} for {type(expected).__name__}"
        if isinstance(expected, float) and isinstance(got, float):
            near = 1e-4 if tolerance is None else tolerance
            same = math.isclose(got, expected, rel_tol=near) or got != got != expected
        else:
            same = got == expected
        return None if same or not exact else f"{got!r} for {expected!r}"
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        return _kinds(got, expected)
    if not exact:
        return None
    got, expected = got.detach().resolve_conj(), expected.detach().resolve_conj()
    least = _TOLERANCES.get(expected.dtype, 1e-4)
    near = least if tolerance is None else max(tolerance, least if least > 1e-3 else 0.0)
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        same = torch.allclose(got, expected, near, near, equal_nan=True)
    else:
        same = torch.equal(got, expected)
    return None if same else f"values {_short(got)} for {_short(expected)}"


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.flatten()[:6].tolist())
