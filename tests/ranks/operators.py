"""Operators on DTensors against the same operators on whole tensors, by brute force.

A `Sample` is an operator's call on whole tensors. `check` runs it once unsharded, then on
thread-ranks with its tensors distributed in every way, or a drawn part of the ways, forward and
backward, and says for each way how it went: RIGHT, REFUSED (a typed error), CRASHED (any other),
WRONG.

Parts are cut here by torch.chunk and split into terms by arithmetic, not by the code under test.
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import math
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch.nn.modules import linear_cross_entropy
from torch.utils._pytree import tree_flatten, tree_map

import dure
from dure.errors import CommError, DureError, InternalError
from dure.tensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from dure.tensor.placement_types import StridedShard
from dure.testing import run_ranks

# Before Python 3.12 a cached property is computed under a lock of its class: a rank that
# communicates in there waits for others, which as threads wait for the lock.
for _kind in vars(linear_cross_entropy).values():
    for _value in vars(_kind).values() if isinstance(_kind, type) else ():
        if isinstance(_value, cached_property):
            _value.lock = nullcontext()

RIGHT, REFUSED, CRASHED, WRONG = range(4)
OUTCOMES = ("right", "refused", "crashed", "wrong")
TERMS = ("sum", "avg", "min", "max", "product")
Way = tuple[tuple[Placement, ...], ...]
"""For each tensor of a call its placements."""


@dataclass
class Sample:
    """An operator's call on whole tensors, and what comes of it.

    Attributes:
        name: For reports.
        fn: The operator.
        args, kwargs: Whole tensors, those to be differentiated requiring gradients.
        outputs: What it returns, flattened.
        grads: Gradients of the tensors that require them, for fixed gradients of the outputs.
        cotangents: Those gradients of the outputs.
        exact: Whether values are compared: they are not random, and not uninitialised.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    grads: list[Any] = field(default_factory=list)
    cotangents: list[torch.Tensor] = field(default_factory=list)
    exact: bool = True

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in their order."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def expect(self) -> bool:
        """Compute outputs and gradients unsharded; tell whether the call is one that works."""
        try:
            found: list[list[Any]] = []
            for seed in (0, 1):
                torch.manual_seed(seed)
                with mock.patch("torch.manual_seed"):  # the database's operators seed themselves
                    outputs, grads = self.run(_fresh, lambda whole: whole)
                found.append([*outputs, *grads])
            self.outputs, self.grads = outputs, grads
        except Exception:
            return False
        if any(t.layout != torch.strided for t in [*self.tensors, *_tensors(found[0])]):
            return False
        alike = all(difference(a, b) is None for a, b in zip(*found, strict=True))
        self.exact = self.exact and alike and "empty" not in self.name
        return True

    def run(
        self, make: Callable[[torch.Tensor], Any], cotangent: Callable[[torch.Tensor], Any]
    ) -> tuple[list[Any], list[Any]]:
        """Run on what `make` makes of the tensors; return outputs and gradients."""
        made: list[Any] = []

        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            made.append(make(leaf))
            return made[-1]

        args, kwargs = tree_map(convert, (self.args, self.kwargs))
        result = self.fn(*args, **kwargs)
        outputs, _ = tree_flatten(result)
        smooth = [t for t in _tensors(outputs) if t.requires_grad]
        leaves = [t for t in made if t.requires_grad]
        grads: list[Any] = []
        if smooth and leaves:
            if not self.cotangents:
                seeded = torch.Generator().manual_seed(7)
                self.cotangents = [
                    torch.randn(t.shape, dtype=t.dtype, generator=seeded) for t in smooth
                ]
            givens = [cotangent(one) for one in self.cotangents]
            grads = list(torch.autograd.grad(smooth, leaves, givens, allow_unused=True))
        return outputs, grads


def _fresh(whole: torch.Tensor) -> torch.Tensor:
    return whole.detach().clone().requires_grad_(whole.requires_grad)


def _tensors(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def difference(got: Any, expected: Any, exact: bool = True, tolerance: float = 1e-4) -> str | None:
    """Return how two results differ; None if they do not.

    Args:
        got, expected: The results.
        exact: Whether values are compared.
        tolerance: How much they may differ, absolutely or of the value; terms of a sum round.
    """
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        if isinstance(got, torch.Tensor) or isinstance(expected, torch.Tensor):
            return f"{type(got).__name__} for {type(expected).__name__}"
        if isinstance(expected, float) and isinstance(got, float):
            alike = math.isclose(got, expected, rel_tol=tolerance) or got != got != expected
        else:
            alike = got == expected
        return None if alike or not exact else f"{got!r} for {expected!r}"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {list(got.shape)} for {expected.dtype} {list(expected.shape)}"
    if not exact:
        return None
    got, expected = got.detach().resolve_conj(), expected.detach().resolve_conj()
    loose = expected.dtype.is_floating_point or expected.dtype.is_complex
    if expected.dtype.itemsize == 2:
        tolerance = max(tolerance, 2e-2)
    if loose and torch.allclose(got, expected, tolerance, tolerance, equal_nan=True):
        return None
    if not loose and torch.equal(got, expected):
        return None
    return f"values {_short(got)} for {_short(expected)}"


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.flatten()[:6].tolist())


# ---- how tensors lie -----------------------------------------------------------------------------


def options(tensor: torch.Tensor, terms: bool) -> list[Placement]:
    """Return the placements that a tensor can have on one axis."""
    found: list[Placement] = [Replicate(), *map(Shard, range(tensor.ndim))]
    if terms and tensor.dtype.is_floating_point:
        found += [Partial(op) for op in TERMS]
    return found


def _commute(placements: Sequence[Placement]) -> bool:
    """Tell whether terms on several axes may be reduced in any order: others are refused."""
    ops = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return len(ops) < 2 or ops == {"sum", "avg"}


def ways(
    sample: Sample,
    sizes: Sequence[int],
    most: int | None = None,
    terms: bool = False,
    seed: int = 0,
) -> list[Way]:
    """Return ways to distribute a call's tensors over a mesh; `most` of them, drawn.

    Those where all tensors lie alike come first, then those where one is cut, and the rest whole.
    """
    each = []
    for tensor in sample.tensors:
        own = list(itertools.product(options(tensor, terms), repeat=len(sizes)))
        own = [placements for placements in own if _commute(placements)]
        if len(sizes) == 2:
            doubled = [p for p in own if type(p[0]) is Shard and p[0] == p[1]]
            own += [(StridedShard(a.dim, split_factor=sizes[1]), a) for a, _ in doubled]
        each.append(own)
    if not each or (most is None or math.prod(map(len, each)) <= most):
        return list(itertools.product(*each))
    draw = random.Random(seed)
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


def part_of(
    whole: torch.Tensor,
    placements: Sequence[Placement],
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> torch.Tensor:
    """Return a rank's part: axis by axis by torch.chunk, later axes first where they cut first."""
    first = [i for i, p in enumerate(placements) if isinstance(p, StridedShard)]
    order = [*(i for i in range(len(sizes)) if i not in first), *first]
    part = whole
    for axis in order:
        placement, n, index = placements[axis], sizes[axis], coordinate[axis]
        if isinstance(placement, Shard):
            chunks = part.chunk(n, placement.dim)
            empty = part.narrow(placement.dim, 0, 0)
            part = chunks[index] if index < len(chunks) else empty
        elif isinstance(placement, Partial):
            part = _term_of(part, placement.reduce_op, n, index)
    return part.clone()


def _term_of(whole: torch.Tensor, op: str, n: int, index: int) -> torch.Tensor:
    """Return a rank's term of a reduction that gives `whole`; no term is like it."""
    count = torch.arange(whole.numel()).reshape(whole.shape)
    other = ((count * 7) % 5 + 1).to(whole.dtype)
    if op == "sum":
        return whole - other * (n - 1) if index == 0 else other
    if op == "avg":
        return whole * n - other * (n - 1) if index == 0 else other
    if op == "product":
        two = torch.full_like(whole, 2.0)
        return whole * 0.5 ** (n - 1) if index == 0 else two
    mine = count % n == index
    return torch.where(mine, whole, whole - other if op == "max" else whole + other)


# ---- running -------------------------------------------------------------------------------------


class Ours:
    """DTensors of this library, on a mesh."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.mesh = init_device_mesh("cpu", tuple(sizes))

    def make(self, whole: torch.Tensor, placements: Sequence[Placement]) -> Any:
        """Distribute a tensor."""
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        part = part_of(whole.detach(), placements, self.mesh.shape, coordinate)
        stride = torch.empty_like(whole, device="meta").stride()
        made = DTensor.from_local(part, self.mesh, placements, shape=whole.shape, stride=stride)
        return made.requires_grad_(whole.requires_grad)

    def whole(self, whole: torch.Tensor) -> Any:
        """Distribute a tensor by giving all of it to each."""
        return self.make(whole, (Replicate(),) * self.mesh.ndim)

    def full(self, tensor: Any) -> Any:
        """Return the value of a result: a DTensor's whole tensor.

        Raises:
            AssertionError: A part's shape or dtype is not what the placements say.
        """
        if not isinstance(tensor, DTensor):
            return tensor
        part = tensor._local_tensor
        if part.shape != tensor.spec.local_shape or part.dtype != tensor.dtype:
            raise AssertionError(f"part {part.dtype} {list(part.shape)} of {tensor.spec}")
        return tensor.detach().full_tensor()

    def running(self) -> AbstractContextManager[object]:
        """Return the block in which a call is run."""
        return nullcontext()

    def agree(self, outcome: int) -> int:
        """Return the worst outcome of all ranks."""
        worst = torch.full((13,), outcome, dtype=torch.int64)
        dure.all_reduce(worst, dure.ReduceOp.MAX)
        return int(worst[0])

    def is_refusal(self, error: BaseException) -> bool:
        """Tell whether an error says that the library does not do this."""
        return isinstance(error, DureError) and not isinstance(error, (CommError, InternalError))


def attempt(sample: Sample, way: Way, on: Any) -> tuple[int, str]:
    """Run a call on distributed tensors and compare; return the outcome and what it was."""
    placements = iter(way)
    try:
        with on.running():
            outputs, grads = sample.run(lambda whole: on.make(whole, next(placements)), on.whole)
            outputs, grads = [on.full(t) for t in outputs], [on.full(t) for t in grads]
    except AssertionError as error:
        return WRONG, str(error)
    except CommError:
        raise
    except Exception as error:
        kind = REFUSED if on.is_refusal(error) else CRASHED
        return kind, f"{type(error).__name__}: {error}"
    if len(outputs) != len(sample.outputs) or len(grads) != len(sample.grads):
        return WRONG, "another number of results"
    loose = 1e-2 if any(p.is_partial() for placements in way for p in placements) else 1e-4
    for number, (got, expected) in enumerate(zip(outputs, sample.outputs, strict=True)):
        wrong = difference(got, expected, sample.exact, loose)
        if wrong is not None:
            return WRONG, f"result {number}: {wrong}"
    for number, (got, expected) in enumerate(zip(grads, sample.grads, strict=True)):
        if got is None and expected is not None and not expected.any():
            continue
        wrong = difference(got, expected, sample.exact, loose)
        if wrong is not None:
            return WRONG, f"gradient {number}: {wrong}"
    return RIGHT, ""


@dataclass
class Result:
    """How one way of one call went."""

    sample: Sample
    way: Way
    outcome: int
    message: str

    def __str__(self) -> str:
        shapes = [f"{list(t.shape)}" for t in self.sample.tensors]
        lie = " ".join(
            f"{shape}({', '.join(map(str, placements))})"
            for shape, placements in zip(shapes, self.way, strict=True)
        )
        return f"{self.sample.name} {OUTCOMES[self.outcome]}: {lie}: {self.message}"


def check(
    tries: Sequence[tuple[Sample, Way]], sizes: Sequence[int], timeout: float = 60.0
) -> Iterator[Result]:
    """Run calls on thread-ranks, in one world for as long as it lasts.

    An error that only some ranks meet breaks the world: the call has crashed, and the rest are run
    in a new one.

    Args:
        tries: Calls and ways.
        sizes: Of the mesh; as many ranks are run.
        timeout: Seconds for 200 tries.
    """
    at = 0
    while at < len(tries):
        batch = tries[at : at + 200]
        results, broken = _batch(batch, sizes, timeout)
        at += len(results)
        yield from results
        if broken is not None:
            sample, way = tries[at]
            at += 1
            yield Result(sample, way, CRASHED, broken)


def _batch(
    tries: Sequence[tuple[Sample, Way]], sizes: Sequence[int], timeout: float
) -> tuple[list[Result], str | None]:
    """Run tries until one breaks the world; return how those before went, and what broke it."""
    n = math.prod(sizes)
    said: list[list[str]] = [[""] * len(tries) for _ in range(n)]
    found: list[list[int]] = [[] for _ in range(n)]
    lock = threading.Lock()
    broken: list[str] = []

    def body(rank: int) -> None:
        on = Ours(sizes)
        for number, (sample, way) in enumerate(tries):
            try:
                outcome, said[rank][number] = attempt(sample, way, on)
                found[rank].append(on.agree(outcome))
            except CommError as error:
                with lock:
                    broken.append(f"{type(error).__name__}: {error}")
                return

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run_ranks(n, body, timeout=timeout)
        except CommError as error:
            broken.append(f"{type(error).__name__}: {error}")
    done = min(map(len, found))
    results: list[Result] = []
    for number, (sample, way) in enumerate(tries[:done]):
        worst = found[0][number]
        message = max((said[rank][number] for rank in range(n)), key=len)
        results.append(Result(sample, way, worst, message))
    if done == len(tries):
        return results, None
    own = [said[rank][done] for rank in range(n) if said[rank][done]]
    return results, " / ".join([*own[:1], *broken[:1]]) or "the ranks did not end"


def database(names: Sequence[str] | None = None, most: int = 8) -> Iterator[tuple[str, Any]]:
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
            chosen = [given[int(i * step)] for i in range(min(most, len(given)))]
            for one in chosen:
                sample = Sample(name, info.op, (one.input, *one.args), dict(one.kwargs))
                if sample.expect() and sample.tensors:
                    yield name, sample
