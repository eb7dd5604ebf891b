"""Redistribution: from one list of placements to another, by steps along one axis each.

A step is one collective of the axis's group, or is local:

    slice            R    -> S(d)    each rank keeps its part
    split            R    -> P       avg, max, min: each rank keeps the tensor; sum: each rank gets
                                     an equal share if that is exact, else the first rank keeps the
                                     tensor and the others get zeros
    all_gather       S(d) -> R
    all_to_all       S(d) -> S(e)
    all_reduce       P    -> R
    reduce_scatter   P    -> S(d)

A cut can be undone only while it is the last one through its dimension (note "Order of cuts" in
spec.py): an axis gathers the parts that it made. The plan is the cheapest path through the states
that such steps reach, found by Dijkstra's algorithm. A step costs the bytes that a rank receives
plus a latency per collective. Plans depend only on the two lists, the mesh and the shape, so all
ranks compute the same plan; plans are cached.

Ranks that redistribute different tensors would exchange bytes that do not belong together. So each
collective of a redistribution carries a description of it (`about` in comm/call.py), which ranks
compare like the other arguments of a call. A difference raises `Desync` with the tensor, placements
and line of each rank.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import torch

from dure.comm import differentiable as maps
from dure.comm.call import NOTHING, Subject, about, subject_of
from dure.comm.capture import capturing
from dure.comm.group import ProcessGroup
from dure.comm.operators import call_operators
from dure.comm.ops import ReduceOp
from dure.comm.pending import pending
from dure.comm.profiling import UNRECORDED, profiler, redistributing
from dure.comm.world import when_left
from dure.errors import InternalError, PlacementError
from dure.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    chunk,
    pad_tensor,
)
from dure.tensor.spec import Cut, DTensorSpec, cuts_of
from dure.trace import hooks

__all__ = [
    "RedistributionPlan",
    "RedistributionStep",
    "all_reduce_of",
    "can_be_split",
    "part_along",
    "parts_along",
    "pieces_of",
    "plan_of",
    "price_of",
    "redistribute",
    "running",
    "steps_between",
    "term_of",
]

_LATENCY_BYTES = 30_000
"""The latency of a collective, as bytes: some 3 us at 10 GB/s."""
_SLICE_BYTES = 1
"""The cost of slicing and splitting: above 0, so that plans have no needless steps."""

_OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}


class Move(Enum):
    """The kinds of steps."""

    SLICE = "slice"
    SPLIT = "split"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"


_LOCAL = (Move.SLICE, Move.SPLIT)
"""Steps that send nothing."""


@dataclass(frozen=True, slots=True)
class RedistributionStep:
    """One step of a redistribution.

    Attributes:
        move: The kind of step.
        axis: The mesh axis.
        before, after: The specs before and after the step.
        nbytes: Bytes that this rank receives.
    """

    move: Move
    axis: int
    before: DTensorSpec
    after: DTensorSpec
    nbytes: int

    @property
    def axis_name(self) -> str:
        """The axis, by its name if it has one."""
        names = self.before.mesh.mesh_dim_names
        return names[self.axis] if names else f"axis {self.axis}"

    def __str__(self) -> str:
        change = f"{self.before.placements[self.axis]} -> {self.after.placements[self.axis]}"
        return f"{self.move.value} along {self.axis_name}: {change}, {self.nbytes} bytes"


@dataclass(frozen=True, slots=True)
class _State:
    """A node of the search: placements, with the cuts of each dimension in their order.

    Attributes:
        terms: For each axis its Partial placement, or None.
        cuts: For each dimension its cuts.
    """

    terms: tuple[Partial | None, ...]
    cuts: tuple[tuple[Cut, ...], ...]

    @staticmethod
    def of(spec: DTensorSpec) -> _State:
        terms = tuple(p if isinstance(p, Partial) else None for p in spec.placements)
        return _State(terms, tuple(spec.cuts(dim) for dim in range(spec.ndim)))

    def placements(self, sizes: Sequence[int]) -> tuple[Placement, ...]:
        found: list[Placement] = [term or Replicate() for term in self.terms]
        for dim, cuts in enumerate(self.cuts):
            for place, cut in enumerate(cuts):
                earlier = [c.axis for c in cuts[:place] if c.axis > cut.axis]
                runs = math.prod(sizes[axis] for axis in earlier) * cut.runs
                found[cut.axis] = Shard(dim) if runs == 1 else StridedShard(dim, split_factor=runs)
        return tuple(found)

    def with_cut(self, dim: int, cut: Cut) -> _State:
        """Cut a dimension once more; the axis is no longer Partial."""
        cuts = list(self.cuts)
        cuts[dim] = (*cuts[dim], cut)
        terms = list(self.terms)
        terms[cut.axis] = None
        return _State(tuple(terms), tuple(cuts))

    def without_cut(self, dim: int) -> _State:
        """Undo the last cut through a dimension."""
        cuts = list(self.cuts)
        cuts[dim] = cuts[dim][:-1]
        return _State(self.terms, tuple(cuts))

    def without_term(self, axis: int) -> _State:
        return _State((*self.terms[:axis], None, *self.terms[axis + 1 :]), self.cuts)

    def with_term(self, axis: int, term: Partial) -> _State:
        return _State((*self.terms[:axis], term, *self.terms[axis + 1 :]), self.cuts)

    def local_numel(self, shape: Sequence[int], sizes: Sequence[int]) -> int:
        """Return the number of elements of the first rank, which has the most."""
        total = 1
        for size, cuts in zip(shape, self.cuts, strict=True):
            left = size
            for cut in cuts:
                left = cut.runs * chunk(-(-left // cut.runs), sizes[cut.axis], 0)[0]
            total *= left
        return total


Transition = tuple[Move, int, "_State", float]
"""A step, its axis, the state after it, and its cost."""


def _next_states(
    state: _State, target: _State, shape: Sequence[int], sizes: Sequence[int], itemsize: int
) -> Iterator[Transition]:
    """Yield the steps that are possible in a state."""
    wanted = {cut.axis: (dim, cut) for dim, cuts in enumerate(target.cuts) for cut in cuts}
    cut_axes = {cut.axis for cuts in state.cuts for cut in cuts}
    here = state.local_numel(shape, sizes) * itemsize
    # A sum of products is not the product of sums: other terms are reduced before any are made.
    settled = all(t is None or t == g for t, g in zip(state.terms, target.terms, strict=True))
    for axis, n in enumerate(sizes):
        term, given = state.terms[axis], target.terms[axis]
        if settled and given is not None and term is None and axis not in cut_axes:
            yield Move.SPLIT, axis, state.with_term(axis, given), _SLICE_BYTES
        if axis in cut_axes or given is not None:
            continue
        share = (n - 1) / n
        if term is not None:
            yield Move.ALL_REDUCE, axis, state.without_term(axis), _LATENCY_BYTES + 2 * share * here
        if axis in wanted:
            dim, cut = wanted[axis]
            after = state.with_cut(dim, cut)
            if term is None:
                yield Move.SLICE, axis, after, _SLICE_BYTES
            elif cut.runs == 1:
                yield Move.REDUCE_SCATTER, axis, after, _LATENCY_BYTES + share * here
    for dim, cuts in enumerate(state.cuts):
        if not cuts:
            continue
        last = cuts[-1]
        axis, n = last.axis, sizes[last.axis]
        uncut = state.without_cut(dim)
        gathered = uncut.local_numel(shape, sizes) * itemsize
        yield Move.ALL_GATHER, axis, uncut, _LATENCY_BYTES + (n - 1) / n * gathered
        if axis in wanted and last.runs == 1:
            to, cut = wanted[axis]
            if to != dim and cut.runs == 1:
                moved = uncut.with_cut(to, cut)
                yield Move.ALL_TO_ALL, axis, moved, _LATENCY_BYTES + (n - 1) / n * here


@lru_cache(maxsize=1 << 14)
def steps_between(source: DTensorSpec, target: DTensorSpec) -> tuple[RedistributionStep, ...]:
    """Return the cheapest steps from one spec to another of the same tensor and mesh.

    Raises:
        PlacementError: The target is Partial along an axis where the source is not, and cannot be
            split into such terms.
    """
    mesh = source.mesh
    sizes, shape = mesh.shape, source.shape
    for axis, (old, new) in enumerate(zip(source.placements, target.placements, strict=True)):
        if (
            isinstance(new, Partial)
            and old != new
            and not (old.is_replicate() and can_be_split(new, source.meta.dtype))
        ):
            raise PlacementError(
                "this redistribution to Partial is not possible: only a replicated tensor can be "
                "split into terms, of sum, max, min, or avg of floats",
                op="redistribute",
                seen=f"{old} -> {new} on axis {axis}",
                fix="Redistribute to Replicate or Shard.",
            )
    start, end = _State.of(source), _State.of(target)
    itemsize = source.meta.dtype.itemsize
    best: dict[_State, float] = {start: 0.0}
    previous: dict[_State, tuple[_State, Move, int]] = {}
    pushed = itertools.count()
    queue: list[tuple[float, int, _State]] = [(0.0, next(pushed), start)]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state == end:
            break
        if cost > best[state]:
            continue
        for move, axis, after, step_cost in _next_states(state, end, shape, sizes, itemsize):
            if cost + step_cost < best.get(after, math.inf):
                best[after] = cost + step_cost
                previous[after] = (state, move, axis)
                heapq.heappush(queue, (cost + step_cost, next(pushed), after))
    if end not in best:
        raise InternalError("no plan was found", seen=f"{source} -> {target}")
    return tuple(_steps_to(end, start, previous, source))


def _steps_to(
    end: _State,
    start: _State,
    previous: dict[_State, tuple[_State, Move, int]],
    spec: DTensorSpec,
) -> list[RedistributionStep]:
    """Return the steps from `start` to `end`, collected backward from the end."""
    steps: list[RedistributionStep] = []
    state = end
    sizes = spec.mesh.shape
    while state != start:
        earlier, move, axis = previous[state]
        before = spec.with_placements(earlier.placements(sizes))
        after = spec.with_placements(state.placements(sizes))
        n, itemsize = sizes[axis], spec.meta.dtype.itemsize
        larger = max(math.prod(before.local_shape), math.prod(after.local_shape)) * itemsize
        nbytes = 0 if move in _LOCAL else larger * (n - 1) // n
        nbytes = 2 * nbytes if move is Move.ALL_REDUCE else nbytes
        steps.append(RedistributionStep(move, axis, before, after, nbytes))
        state = earlier
    return steps[::-1]


def can_be_split(term: Placement, dtype: torch.dtype) -> bool:
    """Return whether a replicated tensor can be split into terms of this reduction.

    Integers cannot become Partial("avg"): the sum of equal numbers may overflow before it is
    divided.
    """
    exact = not (dtype.is_floating_point or dtype.is_complex)
    refused = ("product", "avg") if exact else ("product",)
    return type(term) is Partial and term.reduce_op not in refused


def price_of(source: DTensorSpec, target: DTensorSpec) -> float:
    """Return torch's estimate of the cost of a redistribution, in us; inf if it is not possible.

    Strategies are chosen by it, so that results get the placements that torch gives them. Torch
    models collectives as rings and counts the bytes of even parts. An all_to_all costs 1 us more
    than an all_gather of as many bytes.
    """
    if source is target:
        return 0.0
    try:
        steps = steps_between(source, target)
    except PlacementError:
        return math.inf
    total = 0.0
    for step in steps:
        if step.move in _LOCAL:
            continue
        n, here = source.mesh.shape[step.axis], math.prod(source.shape) * source.meta.dtype.itemsize
        for size, before, after in zip(
            source.mesh.shape, step.before.placements, step.after.placements, strict=True
        ):
            gathers = step.move is Move.ALL_GATHER and before != after
            here /= size if before.is_shard() and not gathers else 1
        hops = (n - 1) * (2 if step.move is Move.ALL_REDUCE else 1)
        total += 6.6 + hops * (2.7 + here / n / 20_700) + (step.move is Move.ALL_TO_ALL)
    return total


# ---- execution -----------------------------------------------------------------------------------

running: ContextVar[RedistributionStep | None] = ContextVar("dure_step", default=None)
"""The step whose collective runs, for hooks that trace collectives."""


def redistribute(
    local: torch.Tensor,
    source: DTensorSpec,
    target: DTensorSpec,
    async_op: bool = False,
    name: str = "",
) -> torch.Tensor:
    """Return this rank's part after a redistribution; `local` itself if no step is needed.

    The result keeps the order of the full tensor's dimensions in memory. If it is a transposed
    tensor, for instance, views of the result are possible as views of the parts.

    Args:
        local: This rank's part before.
        source, target: Specs of the same tensor, on one mesh.
        async_op: Return while the last step runs; the first use of the values waits
            (comm/pending.py).
        name: The name of the parameter, which ranks compare; "" if it has none.

    Collective:
        All ranks of the mesh, in the same order.

    Raises:
        Desync: Ranks redistribute tensors with different specs or names.
    """
    if source is target or source.coordinate is None:
        return local
    steps, order, back, subject = plan_of(source, target)
    if not steps:
        return local
    if local.is_meta:  # there are no values to send
        return local.new_empty(target.local_shape)
    if order is not None:
        local = local.permute(order)
    about(subject_of(f"{name}, {subject.text}") if name else subject)
    recorded = profiler._is_profiler_enabled
    try:
        with redistributing(local, subject.text) if recorded else UNRECORDED:
            for step in steps:
                local = _run(step, local, async_op and step is steps[-1], step is not steps[0])
    finally:
        about(NOTHING)
    return local if back is None else local.permute(back)


class RedistributionPlan(NamedTuple):
    """The steps from one spec to another, and the permutations around them.

    Attributes:
        steps: The steps on the tensor with its dimensions in the order in memory: row-major.
        order: The permutation before the first step; None if the tensor is row-major.
        back: The permutation after the last step.
        subject: The description that ranks compare.
    """

    steps: tuple[RedistributionStep, ...]
    order: tuple[int, ...] | None
    back: tuple[int, ...] | None
    subject: Subject


@lru_cache(maxsize=1 << 14)
def plan_of(source: DTensorSpec, target: DTensorSpec) -> RedistributionPlan:
    """Return the steps from one spec to another, with the permutations around them."""
    order, back, memory_order = source.order, None, ""
    to = ", ".join(map(str, target.placements))
    if order is not None:
        back = tuple(order.index(dim) for dim in range(len(order)))
        memory_order = f" in the order {order}"
    subject = subject_of(f"{source}{memory_order} to ({to}) on {source.mesh!r}")
    if order is not None:
        source, target = source.permuted(order), target.permuted(order)
    return RedistributionPlan(steps_between(source, target), order, back, subject)


def all_reduce_of(
    spec: DTensorSpec, axes: Iterable[int], tensor: torch.Tensor, op: ReduceOp
) -> None:
    """All-reduce a tensor in place along some axes.

    Args:
        spec: The spec of the operand for which the tensor was computed; ranks compare it.
        axes: The mesh axes.
        tensor: The tensor.
        op: The reduction.
    """
    if tensor.is_meta:  # there are no values to send
        return
    about(plan_of(spec, spec).subject)
    try:
        for axis in axes:
            group = spec.mesh.get_group(axis)
            if capturing((tensor,)):
                tensor.copy_(call_operators(maps.AllReduce(group, op), tensor)[0])
            else:
                group.all_reduce(tensor, op)
    finally:
        about(NOTHING)


def _run(
    step: RedistributionStep, local: torch.Tensor, async_op: bool, is_temporary: bool
) -> torch.Tensor:
    if step.move is Move.SLICE:
        return _sliced(step, local, is_temporary)
    if step.move is Move.SPLIT:
        return term_of(local, step.after, step.axis)
    if not hooks:
        return _move(step, local, async_op)
    token = running.set(step)
    try:
        return _move(step, local, async_op)
    finally:
        running.reset(token)


def _move(step: RedistributionStep, local: torch.Tensor, async_op: bool) -> torch.Tensor:
    if step.before.mesh.shape[step.axis] == 1:  # a copy: the result has its own memory
        return local.clone(memory_format=torch.contiguous_format)
    group = step.before.mesh.get_group(step.axis)
    match step.move:
        case Move.ALL_REDUCE:
            return _started(maps.AllReduce(group, _op(step)), local, async_op)
        case Move.REDUCE_SCATTER:
            return _reduce_scatter(step, local, group, async_op)
        case Move.ALL_GATHER:
            return _all_gather(step, local, group, async_op)
        case _:
            return _all_to_all(step, local, group, async_op)


def _started(what: maps.Map, local: torch.Tensor, async_op: bool) -> torch.Tensor:
    if capturing((local,)):
        return call_operators(what, local)[0]
    (output,), work = what.start((local,), async_op)
    return output if work is None else pending(output, work)


def _op(step: RedistributionStep) -> ReduceOp:
    term = step.before.placements[step.axis]
    assert isinstance(term, Partial)
    return _OPS[term.reduce_op]


@lru_cache(maxsize=1 << 14)
def _last_cut(spec: DTensorSpec, axis: int) -> tuple[int, Cut]:
    """Return the dimension that an axis cuts, and the cut, which must be the last one."""
    placement = spec.placements[axis]
    assert isinstance(placement, Shard)
    cut = cuts_of(spec.placements, spec.mesh.shape, placement.dim)[-1]
    assert cut.axis == axis
    return placement.dim, cut


when_left.extend(table.cache_clear for table in (steps_between, plan_of, _last_cut))


def part_along(size: int, cut: Cut, n: int, index: int) -> list[tuple[int, int]]:
    """Return the runs of a dimension that rank `index` of `n` has, as (length, offset)."""
    runs: list[tuple[int, int]] = []
    for number in range(cut.runs):
        length, offset = chunk(size, cut.runs, number)
        part, inside = chunk(length, n, index)
        runs.append((part, offset + inside))
    return runs


def parts_along(size: int, cut: Cut, n: int) -> list[list[tuple[int, int]]]:
    """Return the runs of a dimension that each rank of an axis has, as (length, offset)."""
    return [part_along(size, cut, n, index) for index in range(n)]


def _sliced(step: RedistributionStep, local: torch.Tensor, is_temporary: bool) -> torch.Tensor:
    dim, cut = _last_cut(step.after, step.axis)
    n = step.after.mesh.shape[step.axis]
    coordinate = step.after.coordinate
    assert coordinate is not None
    runs = part_along(local.shape[dim], cut, n, coordinate[step.axis])
    pieces = pieces_of(local, dim, runs)
    # A view would keep a temporary tensor alive; the caller's tensor lives anyway.
    return torch.cat(pieces, dim) if is_temporary or len(pieces) > 1 else pieces[0].contiguous()


def pieces_of(
    tensor: torch.Tensor, dim: int, runs: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """Return views of some runs of a dimension, each (length, offset)."""
    return [tensor.narrow(dim, offset, length) for length, offset in runs]


_DIVIDED = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes for which each rank gets an equal share of a sum.

With float16 small values would lose bits; with complex numbers infinities would become NaN.
"""


def term_of(local: torch.Tensor, spec: DTensorSpec, axis: int) -> torch.Tensor:
    """Return this rank's term of a tensor that is replicated along an axis (step *split*)."""
    n, coordinate = spec.mesh.shape[axis], spec.coordinate
    assert coordinate is not None
    if not spec.placements[axis].is_partial("sum") or n == 1:
        return local
    if n & (n - 1) == 0 and local.dtype in _DIVIDED:
        return local / n
    return torch.zeros_like(local) if coordinate[axis] else local


_MOST_PARTS = 8
"""Along axes with more ranks uneven parts are padded to one length, and sent as one tensor.

With fewer ranks each part is sent from and to where it belongs, without a copy.
"""


def _padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return a tensor with zeros after the end of a dimension, up to `length`."""
    return pad_tensor(tensor, dim, length - tensor.shape[dim])


def _split(tensor: torch.Tensor, dim: int, n: int) -> list[torch.Tensor]:
    """Return views of the parts that torch.chunk would cut, with empty ones up to `n`."""
    return pieces_of(tensor, dim, [chunk(tensor.shape[dim], n, index) for index in range(n)])


def _all_gather(
    step: RedistributionStep, local: torch.Tensor, group: ProcessGroup, async_op: bool
) -> torch.Tensor:
    dim, cut = _last_cut(step.before, step.axis)
    n, size = group.size(), step.after.local_shape[dim]
    local = local.contiguous()
    if cut.runs == 1 and size % n == 0 and size:
        return _started(maps.AllGather(group, dim), local, async_op)
    if cut.runs == 1 and n > _MOST_PARTS:
        padded = _padded(local, dim, -(-size // n))
        gathered = _started(maps.AllGather(group, dim), padded, async_op=False)
        return gathered.narrow(dim, 0, size).contiguous()
    runs = parts_along(size, cut, n)
    sizes = tuple(sum(length for length, _ in r) for r in runs)
    what = maps.AllGather(group, dim, sizes)
    if cut.runs == 1:
        return _started(what, local, async_op)
    shape = list(local.shape)
    shape[dim] = size
    if capturing((local,)):
        gathered = call_operators(what, local)[0].split(sizes, dim)
    else:
        gathered = [what.allocate(local, (*shape[:dim], k, *shape[dim + 1 :])) for k in sizes]
        group.all_gather(gathered, local)
    output = what.allocate(local, shape)
    for part, places in zip(gathered, runs, strict=True):
        begin = 0
        for length, offset in places:
            output.narrow(dim, offset, length).copy_(part.narrow(dim, begin, length))
            begin += length
    return output


def _reduce_scatter(
    step: RedistributionStep, local: torch.Tensor, group: ProcessGroup, async_op: bool
) -> torch.Tensor:
    dim, _ = _last_cut(step.after, step.axis)
    local, n = local.contiguous(), group.size()
    size = local.shape[dim]
    if size % n and n > _MOST_PARTS:
        padded = _padded(local, dim, -(-size // n) * n)
        part = _started(maps.ReduceScatter(group, _op(step), dim), padded, async_op=False)
        return part.narrow(dim, 0, step.after.local_shape[dim]).contiguous()
    sizes = tuple(chunk(size, n, index)[0] for index in range(n)) if size % n else ()
    return _started(maps.ReduceScatter(group, _op(step), dim, sizes), local, async_op)


def _all_to_all(
    step: RedistributionStep, local: torch.Tensor, group: ProcessGroup, async_op: bool
) -> torch.Tensor:
    was, _ = _last_cut(step.before, step.axis)
    now, _ = _last_cut(step.after, step.axis)
    n, here, there = group.size(), local.shape, step.after.local_shape
    local = local.contiguous()
    if here[now] == n * there[now] and there[was] == n * here[was]:
        return _even_all_to_all(local, was, now, group, async_op)
    if n > _MOST_PARTS:
        padded = _padded(local, was, -(-there[was] // n))
        padded = _padded(padded, now, -(-here[now] // n) * n)
        moved = _even_all_to_all(padded, was, now, group, async_op=False)
        return moved.narrow(was, 0, there[was]).narrow(now, 0, there[now]).contiguous()
    if capturing((local,)):
        parts = tuple(_split(local, now, n))
        lengths = (chunk(there[was], n, index)[0] for index in range(n))
        takes = tuple(torch.Size((*there[:was], k, *there[was + 1 :])) for k in lengths)
        gives = tuple(part.shape for part in parts)
        return torch.cat(call_operators(maps.AllToAllList(group, takes, gives), *parts), was)
    output = maps.Map(group).allocate(local, there)
    work = group.all_to_all(_split(output, was, n), _split(local, now, n), async_op)
    return output if work is None else pending(output, work)


def _even_all_to_all(
    local: torch.Tensor, was: int, now: int, group: ProcessGroup, async_op: bool
) -> torch.Tensor:
    """Send each rank its part along `now`; return what all ranks sent, joined along `was`."""
    n = group.size()
    if capturing((local,)):
        parts = local.unflatten(now, (n, local.shape[now] // n)).movedim(now, 0)
        moved = call_operators(maps.AllToAll(group, (), ()), parts.contiguous())[0]
        return moved.movedim(0, was).flatten(was, was + 1)
    shape = list(local.shape)
    shape[was], shape[now] = shape[was] * n, shape[now] // n
    output = maps.Map(group).allocate(local, shape)
    work = group.all_to_all_along(output, local, was, now, async_op)
    return output if work is None else pending(output, work)
