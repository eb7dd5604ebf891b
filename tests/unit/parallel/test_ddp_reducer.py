"""The reducer against a fake group: what is reduced when, without any other rank."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any, cast

import pytest
import torch
from torch import nn

from dure.comm.ops import ReduceOp
from dure.comm.work import Work
from dure.errors import ModuleError, PeerLost
from dure.parallel.ddp.buckets import ReducerOptions
from dure.parallel.ddp.reducer import Reducer
from dure.training.autograd_hooks import on_outputs
from dure.training.grad_views import NamedParameter
from dure.training.pytrees import tensors_of


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


def reducer_of(module: nn.Module, log: list[str], **options: Any) -> Reducer:
    named = [NamedParameter(name=n, parameter=p) for n, p in module.named_parameters()]
    defaults: dict[str, Any] = {"caps": (1,)}
    return Reducer(cast(Any, FakeGroup(log)), named, ReducerOptions(**(defaults | options)))


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


def backward(reducer: Reducer, module: nn.Module, sync: bool = True) -> None:
    reducer.prepare(sync)
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
    order: list[str] = []
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    (module["first"] * (module["second"].sum() * 2)).sum().backward()
    assert log[:2] == ["reduce 2", "reduce 4"]
    assert sorted(order) == ["first", "second"]


def test_backward_without_sync_reduces_nothing_and_the_next_reduces_the_sum() -> None:
    log: list[str] = []
    module = Chain([])
    reducer = reducer_of(module, log)
    backward(reducer, module, sync=False)
    assert log == []
    once = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    backward(reducer, module)
    assert log.count("wait") == 3
    for p, g in zip(module.parameters(), once, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, 2 * g)


def test_two_forwards_each_have_their_own_reduction() -> None:
    log: list[str] = []
    module = Chain([])
    reducer = reducer_of(module, log)
    losses: list[torch.Tensor] = []
    for sync in (True, True, False):
        reducer.prepare(sync)
        out = module(torch.ones(1, 2))
        if sync:
            on_outputs({"out": out}, reducer.on_output)
        losses.append(out.sum())
    for loss, expected in zip(losses, (3, 6, 6), strict=True):
        loss.backward()
        assert sum(entry.startswith("reduce") for entry in log) == expected


def test_backward_that_raised_does_not_disturb_the_next_step() -> None:
    log: list[str] = []
    module = Chain([])
    reducer = reducer_of(module, log)
    reducer.prepare(True)
    x = torch.ones(1, 2, requires_grad=True)

    def fail(_: torch.Tensor) -> None:
        raise KeyError("user's own")

    x.register_hook(fail)
    with pytest.raises(KeyError):
        module(x).sum().backward()
    log.clear()
    module.zero_grad()
    backward(reducer, module)
    # First what the other ranks still wait for: the rest of the backward that raised.
    assert log.count("wait") == 6
    assert reducer.num_reduced == 2
    assert all(p.grad is not None and p.grad.eq(p.grad).all() for p in module.parameters())


def test_missing_gradient_is_named() -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2, bias=False)})
    reducer = reducer_of(module, [])
    reducer.prepare(True)
    with pytest.raises(ModuleError) as caught:
        module["used"](torch.ones(1, 2)).sum().backward()
    assert caught.value.parameters == ("unused.weight",)
    # The next step is unharmed.
    reducer.prepare(True)
    (module["used"](torch.ones(1, 2)) + module["unused"](torch.ones(1, 2))).sum().backward()


def test_gradient_that_is_undefined_counts_as_none() -> None:
    module = nn.ParameterDict({"w": torch.ones(2)})
    undefined: Any = torch._C._functions.UndefinedGrad()  # pyright: ignore
    reducer = reducer_of(module, [])
    reducer.prepare(True)
    with pytest.raises(ModuleError):
        undefined(module["w"].sum()).backward()
    reducer = reducer_of(module, [], allow_unused=True)
    reducer.prepare(True)
    undefined(module["w"].sum()).backward()
    assert module["w"].grad is None


def test_unused_parameter_keeps_its_gradient_when_allowed() -> None:
    module = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)})
    reducer = reducer_of(module, [], allow_unused=True)
    reducer.prepare(True)
    (module["a"] + module["b"]).sum().backward()
    assert module["c"].grad is None
    reducer.prepare(True)
    module["a"].sum().backward()
    assert torch.equal(module["a"].grad, torch.full((2,), 2.0))
    assert torch.equal(module["b"].grad, torch.ones(2))
    assert module["c"].grad is None


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


def test_reducer_that_is_gone_frees_its_memory_without_the_garbage_collector() -> None:
    module = Chain([])
    reducer = reducer_of(module, [])
    reducer.prepare(True)
    loss = module(torch.ones(1, 2)).sum()
    loss.backward()
    flats = [weakref.ref(bucket.flat) for bucket in reducer.buckets]
    gc.disable()
    try:
        module.zero_grad()
        del reducer
        assert [ref() for ref in flats] == [None] * 3
    finally:
        gc.enable()


def test_reducer_that_is_gone_leaves_the_parameters_alone() -> None:
    log: list[str] = []
    module = Chain([])
    reducer = reducer_of(module, log)
    reducer.prepare(True)
    del reducer
    gc.collect()
    module(torch.ones(1, 2)).sum().backward()
    assert log == []


def test_tensors_are_found_in_nested_outputs() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [t.numel() for t in tensors_of({"x": (a, [b, 7]), "y": {"z": c}, "n": None})] == [
        1,
        2,
        3,
    ]


class BrokenGroup(FakeGroup):
    """A group whose operations all fail, when they are waited for."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, async_op: bool) -> Work | None:
        class Failed(Work):
            def wait(self, timeout: object = None) -> bool:
                raise PeerLost("rank 1 is gone", peer=1)

        return Failed(None, [tensor], op="all_reduce")


def test_reductions_behind_one_that_failed_are_dropped_without_a_word():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    named = [NamedParameter(name=n, parameter=p) for n, p in module.named_parameters()]
    reducer = Reducer(cast(Any, BrokenGroup([])), named, ReducerOptions(caps=(1,)))
    reducer.prepare(True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(PeerLost):
            module(torch.ones(1, 2)).sum().backward()
        gc.collect()
    assert len(reducer.buckets) == 4
    assert told == []
