"""Random programs, run on full tensors and on DTensors, whose results must be the same.

A program is a list of steps; each takes tensors that earlier ones made, and makes new ones or
writes some in place. Steps are numbers, whose meaning depends on nothing but the shapes so far, so
that hypothesis can shorten a program that fails. What torch refuses of full tensors is left out;
what DTensors refuse by a typed error ends the program: faults are other results and other errors.
"""

# What operators on DTensors return is a torch.Tensor to pyright; torch._foreach_* are private.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from dure.errors import CommError, PlacementError
from dure.tensor import DTensor, Placement, Replicate, Shard, init_device_mesh
from dure.tensor.placement_types import StridedShard
from tests.tensor.ranks.operators import REFUSED, RIGHT, Result, Run, Sample, judge
from tests.tensor.ranks.parts import ORDERS, made, part

Make = Callable[[torch.Tensor, int], Any]
"""Makes of a full tensor what a program is run on, with placements that the number chooses."""
WAYS_TO_STORE = tuple(ORDERS.values())

STALE = "stale"
"""Stands for a moved view whose source was written: DTensors refuse to read it."""
SHAPES = (
    (4, 6),
    (5, 3),
    (6,),
    (2, 3, 4),
    (3, 1, 5),
    (7,),
    (1, 4),
    (8, 2),
    (2, 2, 2, 3),
    (),
    (0, 3),
)


@dataclass(frozen=True)
class Step:
    """One step: which operator, on which tensors, and a number that decides the rest."""

    op: int
    first: int
    second: int
    number: int


class Machine:
    """The tensors of a program while it runs.

    Attributes:
        tensors: All that were made so far.
        make: Makes a constant that the program needs.
    """

    def __init__(self, inputs: Sequence[Any], make: Make) -> None:
        self.inputs, self.tensors, self.make = list(inputs), list(inputs), make

    def run(self, step: Step) -> str:
        """Do a step; return the operator's name."""
        name, operator = OPERATORS[step.op % len(OPERATORS)]
        x = self.tensors[step.first % len(self.tensors)]
        y = self.tensors[step.second % len(self.tensors)]
        made = operator(self, x, y, step.number)
        new = made if isinstance(made, (tuple, list)) else [made]
        self.tensors += [t for t in new if isinstance(t, torch.Tensor)]
        return name

    def gradients(self) -> list[Any]:
        """Return the inputs' gradients of a sum over all tensors."""
        total: Any = 0.0
        for tensor in self.tensors:
            if tensor.requires_grad and tensor.is_floating_point():
                weights = torch.arange(1.0, tensor.numel() + 1, dtype=tensor.dtype) % 5 - 2
                total = total + (tensor * self.make(weights.reshape(tensor.shape), 0)).sum()
        learners = [t for t in self.inputs if t.requires_grad]
        if not isinstance(total, torch.Tensor) or not learners:
            return []
        return list(torch.autograd.grad(total, learners, allow_unused=True))


def _dim(x: torch.Tensor, n: int) -> int:
    """Return a dimension, counted from either end."""
    return n % (2 * x.ndim) - x.ndim if x.ndim else 0


def _factors(size: int, n: int) -> tuple[int, int]:
    found = [d for d in range(1, size + 1) if size % d == 0]
    first = found[n % len(found)] if found else 0
    return first, size // first if first else 1


def _indices(m: Machine, size: int, n: int) -> Any:
    return m.make(torch.tensor([(n + 2 * i) % max(size, 1) for i in range(n % 4 + 1)]), n)


def _mask(m: Machine, x: torch.Tensor, n: int) -> Any:
    return m.make((torch.arange(x.numel()).reshape(x.shape) + n) % 3 == 0, n)


def _part(x: Any, n: int) -> Any:
    """Take a part of a tensor as indexing does."""
    if x.ndim == 0:
        return x[None]
    dim, size = n % x.ndim, x.shape[n % x.ndim]
    at = n // 4 % max(size, 1)
    ways = (at, slice(at, None), slice(0, size, 2), slice(at, at + 2), slice(None), None)
    return x[(slice(None),) * dim + (ways[n % len(ways)],)]


def _written(x: Any, write: Callable[[Any], Any]) -> None:
    """Write, and return nothing new: what was written is there already."""
    write(x)


def _set(x: Any, key: Any, value: Any) -> None:
    x[key] = value


def _fitting(x: Any, y: Any) -> Any:
    """Return y for writing to x: without history where x can have no gradient."""
    return y if x.is_floating_point() else y.detach()


def _reshaped(x: Any, n: int) -> Any:
    size, rest = _factors(x.numel(), n)
    return x.reshape(((size, rest), (rest, size), (-1,), (size, 1, -1))[n % 4])


def _out(function: Callable[..., Any], x: Any, y: Any) -> Any:
    made = torch.zeros_like(function(x.detach(), y.detach()))
    function(x.detach(), y.detach(), out=made)
    return made


def _detached(x: Any) -> Any:
    """Detach what is not a learner: torch loses the gradient of its views once it is written so."""
    if (
        not isinstance(x, DTensor)
        and x.requires_grad
        and (x if x._base is None else x._base).is_leaf
    ):
        raise RuntimeError("left out")
    return x.detach()


def _swapped(x: Any, n: int) -> Any:
    order = [(i + n) % x.ndim for i in range(x.ndim)]
    return x.permute(order)


class _OtherStrides(torch.autograd.Function):
    """Returns a tensor as it is, in forward; in backward, its gradient, stored in another order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, store: Any) -> Any:
        ctx.store = store
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        return _stored(grad, ctx.store), None


def _stored(x: Any, store: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tensor of the same values and strides; of a DTensor, parts are stored otherwise."""
    if not isinstance(x, DTensor) or any(p.is_partial() for p in x.placements):
        return x.clone()
    stride = x.detach().clone().stride()
    return DTensor.from_local(
        store(x.to_local(grad_placements=x.placements)),
        x.device_mesh,
        x.placements,
        shape=x.shape,
        stride=stride,
    )


OPERATORS: list[tuple[str, Callable[[Machine, Any, Any, int], Any]]] = [
    # pointwise
    ("neg", lambda m, x, y, n: -x),
    ("scale", lambda m, x, y, n: x * (0.5, 2, -1.0, True)[n % 4]),
    ("shift", lambda m, x, y, n: x + (0.5, 2, 1, -3.0)[n % 4]),
    ("divide", lambda m, x, y, n: x / (2, 4.0)[n % 2]),
    ("add", lambda m, x, y, n: torch.add(x, y, alpha=(1, 2)[n % 2])),
    ("sub", lambda m, x, y, n: x - y),
    ("mul", lambda m, x, y, n: x * y),
    ("relu", lambda m, x, y, n: torch.relu(x)),
    ("clamp", lambda m, x, y, n: x.clamp(min=-n % 5, max=n % 7 + 1)),
    ("where", lambda m, x, y, n: torch.where(_mask(m, x, n), x, y)),
    ("where 0", lambda m, x, y, n: torch.where(_mask(m, x, n), x, 0)),
    ("masked_fill", lambda m, x, y, n: x.masked_fill(_mask(m, x, n), n % 2)),
    ("to int", lambda m, x, y, n: (x * 2).to(torch.int64)),
    ("pow", lambda m, x, y, n: x**2),
    # reductions
    ("sum", lambda m, x, y, n: x.sum() if n % 5 == 0 else x.sum(_dim(x, n), keepdim=n % 2 == 0)),
    ("mean", lambda m, x, y, n: x.mean() if n % 5 == 0 else x.mean(_dim(x, n), n % 2 == 0)),
    ("amax", lambda m, x, y, n: x.amax() if n % 5 == 0 else x.amax(_dim(x, n), n % 2 == 0)),
    ("max", lambda m, x, y, n: x.max(_dim(x, n))[0]),
    ("argmax", lambda m, x, y, n: (x % 4).long().argmax(None if n % 5 == 0 else _dim(x, n))),
    # views
    ("t", lambda m, x, y, n: x.transpose(_dim(x, n), _dim(x, n // 3))),
    ("permute", lambda m, x, y, n: _swapped(x, n)),
    ("reshape", lambda m, x, y, n: _reshaped(x, n)),
    ("view", lambda m, x, y, n: x.view(-1, x.shape[-1])),
    ("flatten", lambda m, x, y, n: x.flatten(n % max(x.ndim, 1))),
    (
        "unflatten",
        lambda m, x, y, n: x.unflatten(_dim(x, n), _factors(x.shape[_dim(x, n)], n // 2)),
    ),
    ("unsqueeze", lambda m, x, y, n: x.unsqueeze(n % (x.ndim + 1))),
    ("squeeze", lambda m, x, y, n: x.squeeze() if n % 2 else x.squeeze(_dim(x, n))),
    ("expand", lambda m, x, y, n: x.expand(2, *x.shape)),
    ("part", lambda m, x, y, n: _part(x, n)),
    ("split", lambda m, x, y, n: x.split(n % 3 + 1, _dim(x, n))[:3]),
    ("diagonal", lambda m, x, y, n: x.diagonal(n % 3 - 1)),
    ("detach", lambda m, x, y, n: _detached(x)),
    ("view_as", lambda m, x, y, n: x.view_as(x)),
    ("as_strided", lambda m, x, y, n: x.as_strided((2,), (n % 3,))),
    # strides
    ("store", lambda m, x, y, n: _stored(x, WAYS_TO_STORE[n % 5])),
    ("gradient", lambda m, x, y, n: _OtherStrides.apply(x, WAYS_TO_STORE[n % 5])),
    ("columns", lambda m, x, y, n: ORDERS["columns"](x)),
    ("contiguous", lambda m, x, y, n: x.contiguous()),
    # joined, reordered
    ("cat", lambda m, x, y, n: torch.cat([x, y, x][: n % 2 + 2], _dim(x, n))),
    ("stack", lambda m, x, y, n: torch.stack([x, y], n % (x.ndim + 1))),
    ("flip", lambda m, x, y, n: x.flip(_dim(x, n))),
    ("repeat", lambda m, x, y, n: x.repeat(*[1] * (x.ndim - 1), 2)),
    ("sort", lambda m, x, y, n: x.sort(_dim(x, n), descending=n % 2 == 0)[0]),
    ("clone", lambda m, x, y, n: x.clone()),
    # indexing
    (
        "index_select",
        lambda m, x, y, n: x.index_select(n % x.ndim, _indices(m, x.shape[n % x.ndim], n)),
    ),
    ("index", lambda m, x, y, n: x[_indices(m, x.shape[0], n)]),
    ("list", lambda m, x, y, n: x[[0, n % x.shape[0]]]),
    ("select by mask", lambda m, x, y, n: x[_mask(m, x, n)]),
    (
        "gather",
        lambda m, x, y, n: x.gather(_dim(x, n), m.make(torch.zeros(x.shape, dtype=torch.int64), n)),
    ),
    (
        "index_put",
        lambda m, x, y, n: x.index_put((_indices(m, x.shape[0], n),), x[0], accumulate=True),
    ),
    # products, layers
    ("matmul", lambda m, x, y, n: x @ y),
    ("softmax", lambda m, x, y, n: x.softmax(_dim(x, n))),
    ("new_ones", lambda m, x, y, n: x.new_ones(2, 3)),
    ("number", lambda m, x, y, n: x + y.sum().item()),
    ("equal", lambda m, x, y, n: x * int(torch.equal(x, y))),
    # in place
    ("add_", lambda m, x, y, n: _written(x, lambda t: t.add_(y))),
    ("add_ 1", lambda m, x, y, n: _written(x, lambda t: t.add_(1))),
    ("mul_", lambda m, x, y, n: _written(x, lambda t: t.mul_((0.5, 2, -1)[n % 3]))),
    ("zero_", lambda m, x, y, n: _written(x, lambda t: t.zero_())),
    ("copy_", lambda m, x, y, n: _written(x, lambda t: t.copy_(y))),
    ("relu_", lambda m, x, y, n: _written(x, lambda t: t.relu_())),
    (
        "masked_fill_",
        lambda m, x, y, n: _written(x, lambda t: t.masked_fill_(_mask(m, t, n), n % 2)),
    ),
    ("write a part", lambda m, x, y, n: _written(_part(x, n), lambda t: t.add_(n % 3 + 1))),
    (
        "write a part of a part",
        lambda m, x, y, n: _written(_part(_part(x, n), n // 5), lambda t: t.mul_(2)),
    ),
    ("set", lambda m, x, y, n: _set(x, n % max(x.shape[0], 1), n % 3)),
    ("set to y", lambda m, x, y, n: _set(x, slice(n % 2, None), _fitting(x, y))),
    ("set by mask", lambda m, x, y, n: _set(x, _mask(m, x, n), 1)),
    ("set by index", lambda m, x, y, n: _set(x, _indices(m, x.shape[0], n), 2)),
    (
        "index_add_",
        lambda m, x, y, n: _written(
            x, lambda t: t.index_add_(0, m.make(torch.tensor([0, 0]), n), t.detach()[:2].clone())
        ),
    ),
    ("write the flat one", lambda m, x, y, n: _written(x.view(-1), lambda t: t[:2].add_(1))),
    ("data", lambda m, x, y, n: _written(_detached(x), lambda t: t.sub_(1))),
    ("t_", lambda m, x, y, n: _written(x.view_as(x), lambda t: t.transpose_(0, -1))),
    ("foreach_add_", lambda m, x, y, n: torch._foreach_add_([_detached(x)], 1.0)),
    ("add out", lambda m, x, y, n: _out(torch.add, x, y)),
]


def inputs_of(codes: Sequence[int]) -> list[torch.Tensor]:
    """Return full tensors, all values a number of quarters, so that most sums are exact."""
    made: list[torch.Tensor] = []
    for code in codes:
        shape = SHAPES[code % len(SHAPES)]
        count = torch.arange(math.prod(shape), dtype=torch.float64)
        values = ((count * 7 + code) % 23 - 9) / 4
        whole = WAYS_TO_STORE[code // 48 % 4](values.reshape(shape))
        kind = code // 16 % 3
        made.append(whole.long() if kind == 0 else whole.requires_grad_(kind == 1))
    return made


def way_of(whole: torch.Tensor, code: int, sizes: Sequence[int]) -> list[Placement]:
    """Return placements that a number says."""
    found: list[Placement] = []
    for _ in sizes:
        options = [Replicate(), *map(Shard, range(whole.ndim))]
        found.append(options[code % len(options)])
        code //= len(options)
    if len(sizes) == 2 and code % 3 == 1 and found[0] == found[1] and isinstance(found[0], Shard):
        found[0] = StridedShard(found[0].dim, split_factor=sizes[1])
    return found


def expect(codes: Sequence[int], program: Sequence[Step]) -> tuple[list[Step], Sample]:
    """Run a program on full tensors; return the steps that torch does not refuse, and the results.

    The results are all tensors, then the gradients, unless a step wrote what a gradient needs.
    """
    machine = Machine(inputs_of(codes), lambda full, code: full)
    steps: list[Step] = []
    names: list[str] = []
    for step in program:
        if sum(t.numel() for t in machine.tensors) > 5000:
            break
        try:
            names.append(machine.run(step))
            steps.append(step)
        except (RuntimeError, IndexError, TypeError, ValueError, ZeroDivisionError):
            continue
    results = list(machine.tensors)
    with suppress(RuntimeError):
        results += machine.gradients()
    return steps, Sample(", ".join(names), Machine, (), results=results)


def _part_or_stale(tensor: Any) -> Any:
    try:
        return part(tensor)
    except PlacementError:
        if tensor.copied_at is None:
            raise
        return STALE


def execute(
    rank: int,
    codes: Sequence[int],
    steps: Sequence[Step],
    ways: Sequence[int],
    sizes: tuple[int, ...],
    num_results: int,
) -> Run:
    """Run a program on DTensors, on one rank of several; return its parts of the results.

    It runs twice, so that the second time all calls have a plan.
    """
    del rank
    mesh = init_device_mesh("cpu", sizes)

    orders = [*ORDERS]

    def make(full: torch.Tensor, code: int) -> DTensor:
        return made(mesh, full, way_of(full, code, sizes), orders[code // 51 % len(orders)])

    results: list[Any] = []
    try:
        for _ in range(2):
            fulls = zip(inputs_of(codes), ways, strict=False)
            machine = Machine([make(full, way) for full, way in fulls], make)
            for step in steps:
                machine.run(step)
            results = list(machine.tensors)
            if len(results) < num_results:
                results += machine.gradients()
        return Run(list(map(_part_or_stale, results)))
    except CommError:
        raise
    except Exception as error:
        return Run(error=error)


def compare(expected: Sample, runs: Sequence[Run], sizes: Sequence[int]) -> Result:
    """Compare what all ranks have with the results on full tensors, but for what is stale."""
    stale = [number for number, one in enumerate(runs[0].results) if one == STALE]

    def read(results: Sequence[Any]) -> list[Any]:
        return [one for number, one in enumerate(results) if number not in stale]

    readable = [Run(read(one.results), one.error) for one in runs]
    sample = Sample(expected.name, Machine, (), results=read(expected.results))
    return judge(sample, (), readable, sizes)


def check(
    run: Callable[..., Sequence[Run]],
    codes: Sequence[int],
    ways: Sequence[int],
    program: Sequence[Step],
    sizes: tuple[int, ...],
) -> None:
    """Compare what a program gives on DTensors with what it gives on full tensors.

    `run` calls a function with the rank and arguments on all ranks of the mesh.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps, expected = expect(codes, program)
        count = len(expected.results)
        result = compare(expected, run(execute, codes, steps, ways, sizes, count), sizes)
    assert result.outcome in (RIGHT, REFUSED), f"{result} on {sizes}"


def drawn(seed: int) -> tuple[list[int], list[int], list[Step]]:
    """Draw codes, ways and steps of a program."""
    rng = random.Random(seed)
    numbers = [rng.randrange(256) for _ in range(6 + 4 * 8)]
    steps = [Step(*numbers[at : at + 4]) for at in range(6, len(numbers), 4)]
    return numbers[:3], numbers[3:6], steps
