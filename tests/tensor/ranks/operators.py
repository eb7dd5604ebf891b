"""The oracle for "an operator on DTensors is the operator on full tensors", by brute force.

A `Sample` is a call on full tensors, and a *way* has placements for each of its tensors. Each rank
makes DTensors of its parts, runs the call forward and backward (`run`), and hands over its parts of
the results. The test judges the parts of all ranks together (`judge`): RIGHT, REFUSED (a typed
error), CRASHED (any other), WRONG. `check` does all of it for a function, with every two placements
together, and `outcomes` for any calls and ways.
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import math
import operator
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map

from dure.errors import CommError, DureError, InternalError
from dure.tensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from dure.tensor.placement_types import StridedShard
from dure.testing import run_ranks
from tests.tensor.ranks.parts import REDUCTIONS, commute, difference, fault_of, made, part

# Before Python 3.12 a cached property is computed under a lock of its class: a rank that
# communicates in there waits for others, which as threads wait for the lock. Older torches lack the
# module of these classes.
for _kind in vars(getattr(torch.nn.modules, "linear_cross_entropy", torch.nn)).values():
    for _value in vars(_kind).values() if isinstance(_kind, type) else ():
        if isinstance(_value, cached_property):
            _value.lock = nullcontext()

RIGHT, REFUSED, CRASHED, WRONG = range(4)
OUTCOMES = ("right", "refused", "crashed", "wrong")
MESHES = ((4,), (2, 2))
Way = tuple[tuple[Placement, ...], ...]
"""For each tensor of a call its placements."""


@dataclass
class Sample:
    """An operator's call on full tensors, and its unsharded results.

    Attributes:
        name: For reports.
        fn: The operator.
        args, kwargs: Full tensors, those to be differentiated requiring gradients.
        results: What `compute` found: the outputs, flattened, then the gradients.
        exact: Whether values are compared: they are not random, and not uninitialized.
        cotangents: Gradients of the outputs, from which those of the tensors are computed.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)
    exact: bool = True
    cotangents: list[torch.Tensor] = field(default_factory=list)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in their order."""
        return _tensors(tree_leaves((self.args, self.kwargs)))

    def compute(self) -> Sample:
        """Compute the results unsharded."""
        self.results = self.call(
            lambda full: full.detach().clone().requires_grad_(full.requires_grad), lambda full: full
        )
        return self

    def call(
        self, make: Callable[[torch.Tensor], Any], cotangent: Callable[[torch.Tensor], Any]
    ) -> list[Any]:
        """Run on what `make` makes of the tensors; return outputs and gradients.

        Gradients are those of certain gradients of the outputs, which `cotangent` distributes.
        """
        leaves: list[Any] = []

        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            leaves.append(make(leaf))
            return leaves[-1]

        args, kwargs = tree_map(convert, (self.args, self.kwargs))
        outputs = tree_leaves(self.fn(*args, **kwargs))
        smooth = [t for t in _tensors(outputs) if t.requires_grad]
        learners = [t for t in leaves if t.requires_grad]
        if not smooth or not learners:
            return outputs
        if not self.cotangents:
            seeded = torch.Generator().manual_seed(7)
            self.cotangents = [
                torch.randn(t.shape, dtype=t.dtype, generator=seeded) for t in smooth
            ]
        givens = [
            one if type(t) is torch.Tensor else cotangent(one)
            for one, t in zip(self.cotangents, smooth, strict=True)
        ]
        return outputs + list(torch.autograd.grad(smooth, learners, givens, allow_unused=True))


def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


# ---- ways ----------------------------------------------------------------------------------------


def _options(tensor: torch.Tensor, ops: Sequence[str]) -> list[Placement]:
    """Return the placements that a tensor can have on one axis."""
    return [Replicate(), *map(Shard, range(tensor.ndim)), *map(Partial, ops)]


def ways(
    sample: Sample,
    sizes: Sequence[int],
    most: int | None = None,
    partial: bool = False,
) -> list[Way]:
    """Return ways to distribute a call's tensors over a mesh; `most` of them, drawn.

    Those where all tensors have the same placements come first, then those where one is sharded and
    the others are replicated.
    """
    each = []
    for tensor in sample.tensors:
        ops = REDUCTIONS if partial and tensor.dtype.is_floating_point else ()
        own = list(filter(commute, itertools.product(_options(tensor, ops), repeat=len(sizes))))
        if len(sizes) == 2:
            doubled = [p for p in own if type(p[0]) is Shard and p[0] == p[1]]
            own += [(StridedShard(a.dim, split_factor=sizes[1]), a) for a, _ in doubled]
        each.append(own)
    if not each or (most is None or math.prod(map(len, each)) <= most):
        return list(itertools.product(*each))
    draw = random.Random(0)
    found: dict[Way, None] = {}
    for place in range(max(map(len, each))):
        found[tuple(own[place % len(own)] for own in each)] = None
    for number, own in enumerate(each):
        for one in own:
            found[tuple(one if i == number else o[0] for i, o in enumerate(each))] = None
    first = list(found)
    if len(first) > most:
        return draw.sample(first, most)
    while len(found) < most:
        found[tuple(draw.choice(own) for own in each)] = None
    return list(found)


def pairs(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int], ops: Sequence[str] = ()
) -> list[Way]:
    """Return ways that have every two placements together, as few as a greedy search finds.

    Together means: of one tensor on two axes, or of two tensors on one axis.

    Args:
        tensors: Full tensors.
        sizes: Sizes of the mesh.
        ops: Reductions as Partial of which the first floating-point tensor is given, too.
    """
    first = next((i for i, t in enumerate(tensors) if t.is_floating_point()), 0)
    slots = {
        (number, axis): _options(tensor, ops if number == first else ())
        for number, tensor in enumerate(tensors)
        for axis in range(len(sizes))
    }

    def allowed(one: Any, other: Any) -> bool:
        (slot, placement), (there, beside) = one, other
        if slot[0] != there[0]:
            return slot[1] == there[1]
        return commute([placement, beside])

    left = {
        ((a, p), (b, q)): None
        for a, b in itertools.combinations(slots, 2)
        for p, q in itertools.product(slots[a], slots[b])
        if allowed((a, p), (b, q))
    }
    if len(slots) == 1:
        return [((placement,),) for placement in next(iter(slots.values()))]
    found: list[Way] = []
    while left:
        chosen = dict(next(iter(left)))
        for slot in sorted(slots.keys() - chosen.keys()):
            chosen[slot] = max(
                (p for p in slots[slot] if _commutes_with(chosen, slot, p)),
                key=lambda p, s=slot: sum(_pair(s, p, other) in left for other in chosen.items()),
            )
        for one, other in itertools.combinations(chosen.items(), 2):
            left.pop(_pair(*one, other), None)
        axes = range(len(sizes))
        found.append(tuple(tuple(chosen[n, a] for a in axes) for n in range(len(tensors))))
    return found


def _commutes_with(chosen: dict[Any, Placement], slot: tuple[int, int], p: Placement) -> bool:
    return commute([p, *(q for (number, _), q in chosen.items() if number == slot[0])])


def _pair(slot: Any, placement: Placement, other: Any) -> Any:
    return tuple(sorted([(slot, placement), other], key=lambda one: one[0]))


# ---- running and judging -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """What one rank found: its parts of the results, or an error."""

    results: list[Any] = field(default_factory=list)
    error: BaseException | None = None


def run(sample: Sample, way: Way, mesh: Any) -> Run:
    """Run a call on DTensors, on one rank of a mesh."""
    placements = iter(way)
    replicated = (Replicate(),) * mesh.ndim
    try:
        results = sample.call(
            lambda full: made(mesh, full, next(placements)),
            lambda full: made(mesh, full, replicated),
        )
        return Run(list(map(part, results)))
    except Exception as error:
        return Run(error=error)


def is_refusal(error: BaseException) -> bool:
    """Tell whether an error says that the library does not do this."""
    return isinstance(error, DureError) and not isinstance(error, (CommError, InternalError))


@dataclass
class Result:
    """How one way of one call went."""

    sample: Sample
    way: Way
    outcome: int
    message: str

    def __str__(self) -> str:
        placed = " ".join(
            f"{list(tensor.shape)}({', '.join(map(str, placements))})"
            for tensor, placements in zip(self.sample.tensors, self.way, strict=True)
        )
        return f"{self.sample.name} {OUTCOMES[self.outcome]}: {placed}: {self.message}"


def judge(
    sample: Sample,
    way: Way,
    runs: Sequence[Run],
    sizes: Sequence[int],
    refuses: Callable[[BaseException], bool] = is_refusal,
    tolerance: float | None = None,
) -> Result:
    """Compare what all ranks found with the unsharded results."""
    errors = [one.error for one in runs if one.error is not None]
    if errors:
        worst = next((e for e in errors if not refuses(e)), errors[0])
        by_all = len(errors) == len(runs)
        outcome = REFUSED if refuses(worst) and by_all else CRASHED
        return Result(sample, way, outcome, f"{type(worst).__name__}: {worst}")
    if any(len(one.results) != len(sample.results) for one in runs):
        return Result(sample, way, WRONG, "another number of results")
    if tolerance is None and any(p.is_partial() for placements in way for p in placements):
        single = any(t.dtype == torch.float32 for t in sample.tensors)
        tolerance = 1e-2 if single else None
    columns = zip(*(one.results for one in runs), strict=True)
    for number, (got, expected) in enumerate(zip(columns, sample.results, strict=True)):
        if all(one is None for one in got) and (expected is None or not expected.any()):
            continue  # a gradient of zeros
        fault = fault_of(got, expected, sizes, exact=sample.exact, tolerance=tolerance)
        if fault is not None:
            return Result(sample, way, WRONG, f"result {number}: {fault}")
    return Result(sample, way, RIGHT, "")


def outcomes(
    tries: Sequence[tuple[Sample, Way]], sizes: Sequence[int], tolerance: float | None = None
) -> Iterator[Result]:
    """Run calls on thread-ranks, in one world for as long as it lasts.

    An error that only some ranks meet breaks the world: the call has crashed, and the rest are run
    in a new one.
    """
    at = 0
    while at < len(tries):
        batch = tries[at : at + 200]
        ranks, broken = _batch(batch, sizes)
        for (sample, way), *runs in zip(batch, *ranks, strict=False):
            yield judge(sample, way, runs, sizes, tolerance=tolerance)
        done = min(map(len, ranks))
        if done < len(batch):
            yield Result(*batch[done], CRASHED, broken)
            done += 1
        at += done


def _batch(
    tries: Sequence[tuple[Sample, Way]], sizes: Sequence[int]
) -> tuple[list[list[Run]], str]:
    """Run tries until one breaks the world; return what each rank found, and what broke it."""
    found: list[list[Run]] = [[] for _ in range(math.prod(sizes))]
    broken: list[str] = []

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", tuple(sizes))
        for sample, way in tries:
            one = run(sample, way, mesh)
            if isinstance(one.error, CommError):
                broken.append(f"{type(one.error).__name__}: {one.error}")
                return
            found[rank].append(one)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run_ranks(len(found), body)
        except CommError as error:
            broken.append(f"{type(error).__name__}: {error}")
    return found, " / ".join(broken)


def failures(
    tries: Sequence[tuple[Sample, Way]], sizes: Sequence[int], tolerance: float | None = None
) -> list[str]:
    """Return what did not go right."""
    results = outcomes(tries, sizes, tolerance)
    return [str(result) for result in results if result.outcome != RIGHT]


def check(
    function: Callable[..., Any],
    *operands: torch.Tensor,
    partial: Sequence[str] = (),
    meshes: Sequence[tuple[int, ...]] = MESHES,
    tolerance: float | None = None,
) -> None:
    """Compare a function on DTensors with the function on full tensors, forward and backward.

    Args:
        function: Takes the operands and returns tensors or numbers.
        operands: Full tensors.
        partial: Reductions as Partial of which the first floating-point operand is given, too.
        meshes: Meshes of thread-ranks; on each, every two placements are tried together.
        tolerance: How much floats may differ; by dtype where None.
    """
    sample = Sample(getattr(function, "__name__", "function"), function, operands).compute()
    for sizes in meshes:
        tries = [(sample, way) for way in pairs(operands, sizes, partial)]
        assert failures(tries, sizes, tolerance) == [], f"on {sizes}"


def placed(
    function: Callable[..., Any], *operands: tuple[torch.Tensor, Sequence[Placement]], n: int = 2
) -> list[list[Placement]]:
    """Return the placements of each result of a function, on a mesh of one axis."""

    def body(rank: int) -> list[list[Placement]]:
        mesh = init_device_mesh("cpu", (n,))
        results = function(*(made(mesh, full, placements) for full, placements in operands))
        return [list(r.placements) for r in tree_leaves(results) if isinstance(r, DTensor)]

    return run_ranks(n, body)[0]


# ---- torch's operator database -------------------------------------------------------------------


def _is_usable(sample: Sample) -> bool:
    """Compute a sample of the database; tell whether the call is one that works."""
    found: list[list[Any]] = []
    try:
        for seed in (0, 1):
            torch.manual_seed(seed)
            with mock.patch("torch.manual_seed"):  # the database's operators seed themselves
                found.append(sample.compute().results)
    except Exception:
        return False
    if any(t.layout != torch.strided for t in [*sample.tensors, *_tensors(found[0])]):
        return False
    same = all(difference(a, b) is None for a, b in zip(*found, strict=True))
    sample.exact = same and "empty" not in sample.name
    return bool(sample.tensors)


def database(names: Sequence[str] | None = None, most: int = 8) -> Iterator[tuple[str, Sample]]:
    """Yield samples of torch's operator database: the operator's name, and a `Sample`.

    Args:
        names: Of operators, as the database has them; all where None.
        most: How many of an operator's samples, taken evenly.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        name = info.formatted_name if info.variant_test_name else info.name
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        if names is not None and info.name not in names and name not in names:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            try:
                given = list(
                    info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
                )
            except Exception:
                continue
            step = max(1, len(given) / most)
            for one in [given[int(i * step)] for i in range(min(most, len(given)))]:
                # The database has the method of torch's class, which a subclass may override.
                op = operator.getitem if name == "__getitem__" else info.op
                sample = Sample(name, op, (one.input, *one.args), dict(one.kwargs))
                if _is_usable(sample):
                    yield name, sample
