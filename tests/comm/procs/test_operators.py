"""Functional collectives in captured graphs, under transforms and without values.

Every test runs on two ranks with x = [[1, 2], [3, 4]] on rank 0 and ten times that on rank 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import dure as dist
from dure.comm import functional as F
from dure.errors import UsageError
from dure.nn import functional as nnF

pytestmark = pytest.mark.needs("engine")
_ONE = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def _x(rank: int) -> torch.Tensor:
    return _ONE * 10**rank


def _every_collective(x: torch.Tensor, r: int) -> list[torch.Tensor]:
    return [
        F.wait_tensor(F.all_reduce(x * 2, "sum")),
        F.all_reduce(x, "max", dist.group.WORLD),
        F.all_reduce(x, dist.ReduceOp.premul_sum(3.0), "world"),
        F.broadcast(x, 1),
        F.all_gather_tensor(x, 1),
        F.reduce_scatter_tensor(x, "sum", 0),
        F.reduce_scatter_tensor(x, "avg", -1),
        F.all_to_all_single(x, None, None),
        F.permute_tensor(x, [1, 0]),
        nnF.reduce(x, 0),
        torch.cat(nnF.gather(x, 1)),
        nnF.scatter(x.unbind(0), 0),
        torch.cat(nnF.all_gather(x)),
        nnF.reduce_scatter(x.new_empty(1 + r), [x[0, :1], x[1]]),
        torch.cat(
            nnF.all_to_all([x.new_empty(1 + r), x.new_empty(1 + r)], [x[0, :1], x[1]]),
        ),
    ]


_X, _TEN, _BOTH = [[1, 2], [3, 4]], [[10, 20], [30, 40]], [[1, 2], [3, 4], [10, 20], [30, 40]]
_ON_BOTH = [
    [[22, 44], [66, 88]],
    _TEN,
    [[33, 66], [99, 132]],
    _TEN,
    [[1, 2, 10, 20], [3, 4, 30, 40]],
]
EXPECTED: list[list[Any]] = [
    [
        *_ON_BOTH,
        [[11, 22]],
        [[5.5], [16.5]],
        [[1, 2], [10, 20]],
        _TEN,
        [[11, 22], [33, 44]],
        [[0, 0]] * 4,
        [1, 2],
        _BOTH,
        [11],
        [1, 10],
    ],
    [
        *_ON_BOTH,
        [[33, 44]],
        [[11], [22]],
        [[3, 4], [30, 40]],
        _X,
        [[0, 0], [0, 0]],
        _BOTH,
        [3, 4],
        _BOTH,
        [33, 44],
        [3, 4, 30, 40],
    ],
]


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def _jit_traced(function: Callable[..., Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.trace is deprecated, and warns of lengths
        return torch.jit.trace(lambda x: tuple(function(x)), torch.ones(2, 2), check_trace=False)


CAPTURES: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "eager": lambda f: f,
    "make_fx": lambda f: make_fx(f)(torch.ones(2, 2)),
    "make_fx of fakes": lambda f: make_fx(f, tracing_mode="fake")(torch.ones(2, 2)),
    "make_fx of symbols": lambda f: make_fx(f, tracing_mode="symbolic")(torch.ones(2, 2)),
    "export": lambda f: torch.export.export(_Module(f), (torch.ones(2, 2),), strict=False).module(),
    "jit": _jit_traced,
    "compile": lambda f: torch.compile(f, backend="eager", fullgraph=True),
    "compile aot": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
}


def _captured(rank: int, how: str) -> list[Any]:
    torch._dynamo.reset()
    graph = CAPTURES[how](lambda x: _every_collective(x, rank))
    return [y.tolist() for y in graph(_x(rank))]


@pytest.mark.parametrize("how", CAPTURES)
def test_captured_graph_communicates_the_values_it_is_run_with(process_pool, how):
    assert process_pool(2, "shm").run(_captured, how) == EXPECTED


def _transforms(rank: int) -> None:
    x = _x(rank)
    total = [[11, 22], [33, 44]]

    def reduced(a: torch.Tensor) -> torch.Tensor:
        return F.all_reduce(a, "sum")

    assert torch.vmap(reduced)(x).tolist() == total
    assert torch.vmap(lambda a: F.all_gather_tensor(a, 0), in_dims=1)(x).tolist() == [
        [1, 3, 10, 30],
        [2, 4, 20, 40],
    ]
    assert torch.func.grad(lambda a: reduced(a * a).sum())(x).equal(4 * x)
    each = torch.func.vmap(torch.func.grad(lambda a: reduced(a * a).sum()))
    assert each(x).equal(4 * x)
    assert torch.func.functionalize(reduced)(x).tolist() == total
    assert torch.func.jvp(reduced, (x,), (x,))[1].tolist() == total
    with forward_ad.dual_level():
        dual = reduced(forward_ad.make_dual(x, x))
        assert forward_ad.unpack_dual(dual).tangent.tolist() == total
    with pytest.raises(UsageError, match="MAX"):
        torch.func.jvp(lambda a: F.all_reduce(a, "max"), (x,), (x,))


def test_transforms_of_torch_func(process_pool):
    process_pool(2, "shm").run(_transforms)


def _of_groups(rank: int) -> None:
    group = dist.new_group([0, 1])
    graph = make_fx(lambda x: F.all_reduce(x, "sum", group))(torch.ones(2))
    assert graph(torch.ones(2)).tolist() == [2, 2]
    dist.destroy_process_group(group)
    with pytest.raises(UsageError, match="no group named"):
        graph(torch.ones(2))
    with pytest.raises(UsageError, match="another size"):
        torch.ops.dure.all_gather(torch.ones(2), 0, 3, [], "world")
    channel = dist.group.WORLD.channel(1)
    graph = make_fx(lambda x: F.all_reduce(x, "sum", channel))(torch.ones(2))
    assert graph(torch.ones(2)).tolist() == [2, 2]


def test_graph_finds_its_group_by_name(process_pool):
    process_pool(2, "shm").run(_of_groups)
