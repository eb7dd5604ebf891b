"""Random programs, run on whole tensors and on DTensors, whose results must be the same.

A program is a list of steps; each takes tensors that earlier ones made, and makes new ones or
writes some in place. Steps are numbers, whose meaning depends on nothing but the shapes so far, so
that hypothesis can shorten a program that fails. What torch refuses of whole tensors is left out;
what DTensors refuse by a typed error ends the program: faults are other results and other errors.
"""

# What operators on DTensors return is a torch.Tensor to pyright; torch._foreach_* are private.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dure.errors import CommError, DureError, InternalError
from dure.tensor import DTensor, Placement, Replicate, Shard
from dure.tensor.placement_types import StridedShard
from ranks.operators import Ours, difference

Make = Callable[[torch.Tensor, int], Any]
"""Makes of a whole tensor what a program is run on, lying in a way that the number says."""

REFUSED = "refused: "
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


def _reshaped(x: Any, n: int) -> Any:
    size, rest = _factors(x.numel(), n)
    return x.reshape(((size, rest), (rest, size), (-1,), (size, 1, -1))[n % 4])


def _out(function: Callable[..., Any], x: Any, y: Any) -> Any:
    made = torch.zeros_like(function(x.detach(), y.detach()))
    function(x.detach(), y.detach(), out=made)
    return made


def _swapped(x: Any, n: int) -> Any:
    order = [(i + n) % x.ndim for i in range(x.ndim)]
    return x.permute(order)


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
    ("abs", lambda m, x, y, n: x.abs()),
    ("sigmoid", lambda m, x, y, n: torch.sigmoid(x)),
    ("clamp", lambda m, x, y, n: x.clamp(min=-n % 5, max=n % 7 + 1)),
    ("maximum", lambda m, x, y, n: torch.maximum(x, y)),
    ("where", lambda m, x, y, n: torch.where(_mask(m, x, n), x, y)),
    ("where 0", lambda m, x, y, n: torch.where(_mask(m, x, n), x, 0)),
    ("less", lambda m, x, y, n: x < y),
    ("masked_fill", lambda m, x, y, n: x.masked_fill(_mask(m, x, n), n % 2)),
    ("to int", lambda m, x, y, n: (x * 2).to(torch.int64)),
    ("to float", lambda m, x, y, n: x.to((torch.float64, torch.float32)[n % 2])),
    ("pow", lambda m, x, y, n: x**2),
    ("addcmul", lambda m, x, y, n: torch.addcmul(x, x, y, value=0.5)),
    ("lerp", lambda m, x, y, n: torch.lerp(x, y, 0.25)),
    # reductions
    ("sum", lambda m, x, y, n: x.sum() if n % 5 == 0 else x.sum(_dim(x, n), keepdim=n % 2 == 0)),
    ("mean", lambda m, x, y, n: x.mean() if n % 5 == 0 else x.mean(_dim(x, n), n % 2 == 0)),
    ("amax", lambda m, x, y, n: x.amax() if n % 5 == 0 else x.amax(_dim(x, n), n % 2 == 0)),
    ("amin", lambda m, x, y, n: x.amin(_dim(x, n), n % 2 == 0)),
    ("prod", lambda m, x, y, n: (x % 3).prod(_dim(x, n))),
    ("max", lambda m, x, y, n: x.max(_dim(x, n))[0]),
    ("argmax", lambda m, x, y, n: (x % 4).long().argmax(None if n % 5 == 0 else _dim(x, n))),
    ("any", lambda m, x, y, n: (x > 1).any(_dim(x, n))),
    ("all", lambda m, x, y, n: (x > 0).all()),
    ("var", lambda m, x, y, n: x.var(_dim(x, n), correction=n % 2)),
    (
        "norm",
        lambda m, x, y, n: torch.linalg.vector_norm(x, (2, 1, math.inf, 0)[n % 4], _dim(x, n)),
    ),
    ("logsumexp", lambda m, x, y, n: torch.logsumexp(x, _dim(x, n))),
    ("count", lambda m, x, y, n: torch.count_nonzero(x > n % 3)),
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
    ("expand ones", lambda m, x, y, n: x.expand([3 if s == 1 else -1 for s in x.shape])),
    ("part", lambda m, x, y, n: _part(x, n)),
    ("part of part", lambda m, x, y, n: _part(_part(x, n), n // 5)),
    ("narrow", lambda m, x, y, n: x.narrow(_dim(x, n), 0, max(x.shape[_dim(x, n)] - 1, 0))),
    ("split", lambda m, x, y, n: x.split(n % 3 + 1, _dim(x, n))[:3]),
    ("chunk", lambda m, x, y, n: x.chunk(2, _dim(x, n))),
    ("unbind", lambda m, x, y, n: x.unbind(_dim(x, n))[:2]),
    ("diagonal", lambda m, x, y, n: x.diagonal(n % 3 - 1)),
    ("detach", lambda m, x, y, n: x.detach()),
    ("view_as", lambda m, x, y, n: x.view_as(x)),
    ("as_strided", lambda m, x, y, n: x.as_strided((2,), (n % 3,))),
    # joined, reordered
    ("cat", lambda m, x, y, n: torch.cat([x, y, x][: n % 2 + 2], _dim(x, n))),
    ("stack", lambda m, x, y, n: torch.stack([x, y], n % (x.ndim + 1))),
    ("flip", lambda m, x, y, n: x.flip(_dim(x, n))),
    ("roll", lambda m, x, y, n: x.roll(n % 3, None if n % 5 == 0 else _dim(x, n))),
    ("repeat", lambda m, x, y, n: x.repeat(*[1] * (x.ndim - 1), 2)),
    ("pad", lambda m, x, y, n: F.pad(x, (1, n % 3), value=float(n % 2))),
    ("tril", lambda m, x, y, n: x.tril(n % 3 - 1)),
    ("triu", lambda m, x, y, n: x.triu(n % 3 - 1)),
    ("cumsum", lambda m, x, y, n: x.cumsum(_dim(x, n))),
    ("sort", lambda m, x, y, n: x.sort(_dim(x, n), descending=n % 2 == 0)[0]),
    ("topk", lambda m, x, y, n: x.topk(1, _dim(x, n))[0]),
    ("clone", lambda m, x, y, n: x.clone()),
    ("contiguous", lambda m, x, y, n: x.contiguous()),
    # indexing
    (
        "index_select",
        lambda m, x, y, n: x.index_select(n % x.ndim, _indices(m, x.shape[n % x.ndim], n)),
    ),
    ("index", lambda m, x, y, n: x[_indices(m, x.shape[0], n)]),
    ("index 2", lambda m, x, y, n: x[:, _indices(m, x.shape[1], n)]),
    ("list", lambda m, x, y, n: x[[0, n % x.shape[0]]]),
    ("select by mask", lambda m, x, y, n: x[_mask(m, x, n)]),
    (
        "gather",
        lambda m, x, y, n: x.gather(_dim(x, n), m.make(torch.zeros(x.shape, dtype=torch.int64), n)),
    ),
    (
        "scatter_add",
        lambda m, x, y, n: torch.scatter_add(
            x, _dim(x, n), m.make(torch.zeros(x.shape, dtype=torch.int64), n), x
        ),
    ),
    ("nonzero", lambda m, x, y, n: (x > 1).nonzero()),
    (
        "index_put",
        lambda m, x, y, n: x.index_put((_indices(m, x.shape[0], n),), x[0], accumulate=True),
    ),
    # products, layers
    ("matmul", lambda m, x, y, n: x @ y),
    ("gram", lambda m, x, y, n: x @ x.mT),
    (
        "linear",
        lambda m, x, y, n: F.linear(
            x,
            m.make(torch.ones(3, x.shape[-1], dtype=x.dtype), n),
            m.make(torch.ones(3, dtype=x.dtype), n // 7),
        ),
    ),
    ("einsum", lambda m, x, y, n: torch.einsum("...i,...j->...ij", x, y)),
    ("softmax", lambda m, x, y, n: x.softmax(_dim(x, n))),
    ("log_softmax", lambda m, x, y, n: x.log_softmax(_dim(x, n))),
    ("layer_norm", lambda m, x, y, n: F.layer_norm(x, x.shape[-1:])),
    ("mse", lambda m, x, y, n: F.mse_loss(x, y, reduction=("mean", "sum", "none")[n % 3])),
    (
        "cross_entropy",
        lambda m, x, y, n: F.cross_entropy(
            x,
            m.make(torch.full(x.shape[:1] + x.shape[2:], n % x.shape[1]), n),
            reduction=("mean", "sum", "none")[n % 3],
            ignore_index=n % 5,
        ),
    ),
    ("embedding", lambda m, x, y, n: F.embedding(_indices(m, x.shape[0], n), x)),
    ("zeros_like", lambda m, x, y, n: torch.zeros_like(x)),
    ("new_ones", lambda m, x, y, n: x.new_ones(2, 3)),
    ("number", lambda m, x, y, n: x + y.sum().item()),
    ("equal", lambda m, x, y, n: x * int(torch.equal(x, y))),
    # in place
    ("add_", lambda m, x, y, n: _written(x, lambda t: t.add_(y))),
    ("add_ 1", lambda m, x, y, n: _written(x, lambda t: t.add_(1))),
    ("mul_", lambda m, x, y, n: _written(x, lambda t: t.mul_((0.5, 2, -1)[n % 3]))),
    ("mul_ y", lambda m, x, y, n: _written(x, lambda t: t.mul_(y))),
    ("zero_", lambda m, x, y, n: _written(x, lambda t: t.zero_())),
    ("fill_", lambda m, x, y, n: _written(x, lambda t: t.fill_(n % 3))),
    ("copy_", lambda m, x, y, n: _written(x, lambda t: t.copy_(y))),
    ("relu_", lambda m, x, y, n: _written(x, lambda t: t.relu_())),
    ("clamp_", lambda m, x, y, n: _written(x, lambda t: t.clamp_(-1, 2))),
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
    ("set to y", lambda m, x, y, n: _set(x, slice(n % 2, None), y)),
    ("set by mask", lambda m, x, y, n: _set(x, _mask(m, x, n), 1)),
    ("set by index", lambda m, x, y, n: _set(x, _indices(m, x.shape[0], n), 2)),
    (
        "index_add_",
        lambda m, x, y, n: _written(
            x, lambda t: t.index_add_(0, m.make(torch.tensor([0, 0]), n), t.detach()[:2].clone())
        ),
    ),
    ("write the flat one", lambda m, x, y, n: _written(x.view(-1), lambda t: t[:2].add_(1))),
    ("data", lambda m, x, y, n: _written(x.detach(), lambda t: t.sub_(1))),
    ("t_", lambda m, x, y, n: _written(x.view_as(x), lambda t: t.transpose_(0, -1))),
    ("foreach_add_", lambda m, x, y, n: torch._foreach_add_([x.detach()], 1.0)),
    ("foreach_mul", lambda m, x, y, n: torch._foreach_mul([x, y], 2.0)),
    ("add out", lambda m, x, y, n: _out(torch.add, x, y)),
    ("mul out", lambda m, x, y, n: _out(torch.mul, x, y)),
]


def inputs_of(codes: Sequence[int]) -> list[torch.Tensor]:
    """Return whole tensors, all values a number of quarters, so that most sums are exact."""
    made: list[torch.Tensor] = []
    for code in codes:
        shape = SHAPES[code % len(SHAPES)]
        count = torch.arange(math.prod(shape), dtype=torch.float64)
        values = ((count * 7 + code) % 23 - 9) / 4
        whole = values.reshape(shape).clone()
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


@dataclass
class Expected:
    """What a program does on whole tensors: the steps that torch does not refuse, and the end."""

    steps: list[tuple[Step, str]]
    tensors: list[torch.Tensor]
    gradients: list[Any] | None


def expect(codes: Sequence[int], program: Sequence[Step]) -> Expected:
    """Run a program on whole tensors."""
    machine = Machine(inputs_of(codes), lambda whole, code: whole)
    steps: list[tuple[Step, str]] = []
    for step in program:
        if sum(t.numel() for t in machine.tensors) > 5000:
            break
        try:
            steps.append((step, machine.run(step)))
        except (RuntimeError, IndexError, TypeError, ValueError, ZeroDivisionError):
            continue
    try:
        gradients = machine.gradients()
    except RuntimeError:  # a step wrote what a gradient needs
        gradients = None
    return Expected(steps, machine.tensors, gradients)


def _is_stale(got: Any) -> bool:
    """Tell whether a tensor is a moved view whose source was written: it is refused."""
    if isinstance(got, DTensor) and got.copied_at is not None:
        try:
            got.clone()
        except DureError:
            return True
    return False


def _difference(on: Ours, got: Any, right: Any) -> str | None:
    """Return how a result differs from that of plain torch, its strides too."""
    if got is None and right is not None and not right.any():
        return None  # a gradient that is not there
    single = right is not None and right.dtype == torch.float32
    wrong = difference(on.full(got), right, tolerance=1e-5 if single else 1e-8)
    long = all(n > 1 for n in right.shape) if wrong is None and isinstance(got, DTensor) else False
    if long and got.stride() != right.stride():
        return f"strides {got.stride()} for {right.stride()}"
    return wrong


def fault(
    codes: Sequence[int], expected: Expected, ways: Sequence[int], sizes: Sequence[int]
) -> str | None:
    """Run a program on DTensors, on one rank of several.

    Returns:
        What is wrong; what was refused, which begins with `REFUSED`; None if all is right.
    """
    on = Ours(sizes)

    def make(whole: torch.Tensor, code: int) -> Any:
        return on.make(whole, way_of(whole, code, sizes))

    made = [make(w, way) for w, way in zip(inputs_of(codes), ways, strict=False)]
    machine = Machine(made, make)
    done = "inputs"
    try:
        for number, (step, name) in enumerate(expected.steps):
            done = f"step {number}, {name}"
            machine.run(step)
        done = "gradients"
        gradients = None if expected.gradients is None else machine.gradients()
        done = "results"
        pairs = list(zip(machine.tensors, expected.tensors, strict=True))
        if gradients is not None:
            pairs += list(zip(gradients, expected.gradients or [], strict=True))
        for number, (got, right) in enumerate(pairs):
            done = f"result {number} of {len(machine.tensors)}"
            wrong = None if _is_stale(got) else _difference(on, got, right)
            if wrong is not None:
                return f"{done}: {wrong}"
    except (CommError, InternalError):
        raise
    except DureError as error:
        return f"{REFUSED}{done}: {error}"
    except Exception as error:
        return f"{done}: {type(error).__name__}: {error}"
    return None
