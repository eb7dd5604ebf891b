"""The reducer against a fake group: what is reduced when, without any other rank."""

from __future__ import annotations

import gc
import warnings
from typing import Any, cast

import pytest
import torch
from torch import nn

from dure.comm.ops import ReduceOp
from dure.comm.work import Work
from dure.errors import PeerLost
from dure.parallel.ddp.buckets import ReducerOptions
from dure.parallel.ddp.reducer import Reducer
from dure.training.grad_views import NamedParameter


class FakeGroup:
    """A group of one rank that writes down what it is asked for, in order."""

    group_name = "fake"
    backend_name = "fake"
    closed = False

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    global_ranks = (0,)

    def allocate(self, op: str, nbytes: int, node_shared: bool) -> None:
        return None

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        outputs[0].copy_(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self.log.append("broadcast")

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Work | None:
        assert op == ReduceOp.AVG
        self.log.append(f"reduce {tensor.numel()}")
        log = self.log
        if not async_op:
            log.append("wait")
            return None

        class Ended(Work):
            def wait(self, timeout: object = None) -> bool:
                log.append("wait")
                return True

        return Ended(None, [tensor])


def reducer_of(
    module: nn.Module, log: list[str], group: type[FakeGroup] = FakeGroup, **options: Any
) -> Reducer:
    named = [NamedParameter(name=n, parameter=p) for n, p in module.named_parameters()]
    return Reducer(cast(Any, group(log)), named, ReducerOptions(caps=(1,), **options))


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


def test_gradient_that_is_undefined_counts_as_none() -> None:
    module = nn.ParameterDict({"w": torch.ones(2)})
    undefined: Any = torch._C._functions.UndefinedGrad()
    reducer = reducer_of(module, [], allow_unused=True)
    reducer.prepare(True)
    undefined(module["w"].sum()).backward()
    assert module["w"].grad is None


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


def test_gradient_lies_in_the_bucket_and_can_be_detached() -> None:
    module = nn.ParameterDict({"w": torch.ones(2)})
    reducer = reducer_of(module, [])
    backward_of = module["w"].sum()
    reducer.prepare(True)
    backward_of.backward()
    gradient = module["w"].grad
    assert gradient.data_ptr() == reducer.buckets[0].flat.data_ptr()
    gradient.detach_().zero_()  # what zero_grad(set_to_none=False) does
    reducer.prepare(True)
    (module["w"] * 5).sum().backward()
    assert module["w"].grad is gradient
    assert gradient.tolist() == [5, 5]


def test_gradient_of_channels_last_weight_has_its_memory_order() -> None:
    conv = nn.Conv2d(3, 4, 2)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    reducer = reducer_of(conv, [])
    reducer.prepare(True)
    conv(torch.ones(1, 3, 4, 4)).sum().backward()
    assert conv.weight.grad is not None
    assert conv.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_reducer_that_is_gone_leaves_the_parameters_alone() -> None:
    log: list[str] = []
    module = Chain([])
    reducer = reducer_of(module, log)
    reducer.prepare(True)
    del reducer
    gc.collect()
    module(torch.ones(1, 2)).sum().backward()
    assert log == []


class BrokenGroup(FakeGroup):
    """A group whose operations all fail, when they are waited for."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Work | None:
        class Failed(Work):
            def wait(self, timeout: object = None) -> bool:
                raise PeerLost("rank 1 is gone", peer=1)

        return Failed(None, [tensor], op="all_reduce")


def test_reductions_behind_one_that_failed_are_dropped_without_a_warning() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    reducer = reducer_of(module, [], group=BrokenGroup)
    reducer.prepare(True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(PeerLost):
            module(torch.ones(1, 2)).sum().backward()
        gc.collect()
    assert len(reducer.buckets) == 4
    assert seen == []
