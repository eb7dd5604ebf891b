"""The reducer against a fake group: what is reduced when, without any other rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from dure.comm.ops import ReduceOp
from dure.comm.work import Work
from dure.parallel.ddp.buckets import ReducerOptions
from dure.parallel.ddp.reducer import Reducer
from dure.training.grad_views import NamedParameter


def reducer_of(module: nn.Module, log: list[str]) -> Reducer:
    """Return a reducer whose group writes down what it is asked for, in order."""

    class Ended(Work):
        def wait(self, timeout: object = None) -> bool:
            log.append("wait")
            return True

    def all_reduce(tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Work | None:
        assert op == ReduceOp.AVG
        log.append(f"reduce {tensor.numel()}")
        if async_op:
            return Ended(None, [tensor])
        log.append("wait")
        return None

    group = SimpleNamespace(
        group_name="fake",
        backend_name="fake",
        closed=False,
        global_ranks=(0,),
        rank=lambda: 0,
        size=lambda: 1,
        allocate=lambda *_: None,
        all_gather=lambda outputs, tensor: outputs[0].copy_(tensor),
        broadcast=lambda *_: log.append("broadcast"),
        all_reduce=all_reduce,
    )
    named = [NamedParameter(name=n, parameter=p) for n, p in module.named_parameters()]
    return Reducer(cast(Any, group), named, ReducerOptions(caps=(1,)))


class Probe(torch.autograd.Function):
    """An identity that writes its name down when backward passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: list[str], name: str) -> torch.Tensor:
        ctx.log, ctx.name = log, name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.log.append(ctx.name)
        return grads[0], None, None


class Chain(nn.Module):
    """Three layers of one weight each; backward writes down when it reaches each of them."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.log = log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(cast(torch.Tensor, Probe.apply(x, self.log, f"below layer {i}")))
        return x


def backward(reducer: Reducer, module: nn.Module) -> None:
    reducer.prepare(True)
    module(torch.ones(1, 2, requires_grad=True)).sum().backward()


def test_reductions_start_while_backward_goes_on() -> None:
    log: list[str] = []
    module = Chain(log)
    backward(reducer_of(module, log), module)
    # 4 gradients a bucket, and the bitmap of 3 parameters in the last one. A layer's weight and its
    # input get their gradients in either order, but layer 2 is under way before backward has
    # reached layer 0.
    assert log.index("reduce 4") < log.index("below layer 0")
    assert log.count("reduce 4") == 2
    assert log[-5:] == ["reduce 8", "wait", "wait", "wait", "broadcast"]


def test_buckets_start_in_their_order_whatever_becomes_ready_first() -> None:
    log: list[str] = []
    module = nn.ParameterDict({"first": torch.ones(1), "second": torch.ones(2)})
    reducer = reducer_of(module, log)
    reducer.prepare(True)
    # `first` is ready first, but its bucket comes after that of `second`.
    (module["first"] * (module["second"].sum() * 2)).sum().backward()
    assert log[:2] == ["reduce 2", "reduce 4"]


def test_gradient_that_the_program_keeps_keeps_its_values() -> None:
    module = nn.ParameterDict({"w": torch.ones(2)})
    reducer = reducer_of(module, [])
    kept: list[torch.Tensor] = []
    for step in (1.0, 2.0, 3.0):
        reducer.prepare(True)
        (module["w"] * step).sum().backward()
        gradient = module["w"].grad
        assert gradient is not None
        kept.append(gradient)
        module["w"].grad = None
        del gradient
    assert [g.tolist() for g in kept] == [[1, 1], [2, 2], [3, 3]]
