"""Strategy *shared*: no rank reads while another writes, and all see what was written."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dure import destroy_process_group, new_group
from dure.comm.group import ProcessGroup
from dure.device_mesh import DeviceMesh
from dure.errors import ModuleError
from dure.fsdp import fully_shard, strategy
from dure.parallel.fsdp.state import state_of
from dure.testing import run_ranks
from dure.training.turns import Turns
from tests.thread_ranks import on_ranks

STEPS = 25


class Slow(torch.autograd.Function):
    """Looks at a tensor after a while, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor, look: Callable[..., None]) -> Any:
        ctx.seen, ctx.look = seen, look
        look(seen)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.look(ctx.seen)
        return gradients[0], None, None


class Net(nn.Module):
    def __init__(self, look: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 3))
        self.inner = nn.Linear(3, 3)
        self.look = look

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(self.inner(x) @ self.weight.t(), self.weight.detach(), self.look)


def looking(rank: int, expected: list[float]) -> Callable[[torch.Tensor], None]:
    delays = random.Random(rank)

    def look(seen: torch.Tensor) -> None:
        for _ in range(2):
            assert set(seen.flatten().tolist()) == {expected[0]}
            time.sleep(delays.choice([0, 0.001, 0.004]))

    return look


def frozen(model: Net) -> Net:
    """Nothing is reduced, so that no rank waits for a reduction."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize(("size", "evaluating"), [(2, False), (3, False), (3, True)])
def test_writes_between_steps_are_not_seen_by_the_step_before(size: int, evaluating: bool) -> None:
    def body(rank: int) -> None:
        expected = [0.0]
        model = frozen(Net(looking(rank, expected)))
        with strategy("shared"):
            fully_shard(model.inner)
            fully_shard(model)
        for step in range(1, STEPS):
            with torch.set_grad_enabled(not evaluating):
                out = model(torch.ones(2, 3, requires_grad=True))
            if not evaluating:
                out.sum().backward()
            with torch.no_grad():
                model.weight.fill_(float(step)).clamp_(0, STEPS)
            expected[0] = float(step)

    run_ranks(size, body)


@on_ranks(2)
def test_an_optimizer_waits_for_a_forward_without_backward(rank: int) -> None:
    expected = [0.0]
    model = Net(looking(rank, expected))
    with strategy("shared"):
        fully_shard(model)
    weight = model.weight
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for step in range(1, STEPS):
        model(torch.ones(2, 3))
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
        expected[0] = float(step)


@on_ranks(2)
def test_a_backward_after_another_may_read_again(rank: int) -> None:
    """retain_graph, and an evaluation between forward and backward."""

    model = Net(lambda seen: None)
    with strategy("shared"):
        fully_shard(model)
    with torch.no_grad():
        model.weight.fill_(1.0)
    loss = model(torch.ones(2, 3)).sum()
    with torch.no_grad():
        model(torch.ones(2, 3))
    loss.backward(retain_graph=True)
    once = model.inner.weight.grad.to_local().clone()
    loss.backward()
    assert torch.equal(model.inner.weight.grad.to_local(), 2 * once)


@on_ranks(2)
def test_a_backward_through_weights_that_were_stepped_is_refused(rank: int, way: str) -> None:
    model = Net(lambda seen: None)
    with strategy(way):
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


WRITTEN = {  # written while module 1 runs -> the parameter that the error names
    "unsharded": "1.0.weight",
    "shard": "0.weight",
    "local tensor": "0.weight",
    "in backward": "0.weight",
}


@pytest.mark.parametrize("kind", WRITTEN)
@on_ranks(2)
def test_writing_in_a_step_is_refused_and_named(rank: int, kind: str) -> None:
    """Through the unsharded parameter of a module, or a shard that the program has kept."""

    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    with strategy("shared"):
        fully_shard(model[1][0])
        fully_shard(model)
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    shard, inner = model[0].weight, model[1][0]

    def write(*_: object) -> None:
        tensors = {"unsharded": inner.weight, "local tensor": shard.to_local()}
        with torch.no_grad():
            tensors.get(kind, shard).mul_(2)

    if kind == "in backward":
        handle = inner.register_full_backward_hook(write)
    else:
        handle = inner.register_forward_pre_hook(write)
    with pytest.raises(ModuleError) as error:
        model(x).sum().backward()
    assert error.value.parameters == (WRITTEN[kind],)
    handle.remove()
    write()  # between steps
    model(x).sum().backward()


def test_turns_go_with_their_model() -> None:
    def body(rank: int) -> list[weakref.ref[Turns]]:
        group = new_group([0, 1])
        assert isinstance(group, ProcessGroup)
        found = []
        for backward in (True, False):
            model: Any = nn.Linear(4, 4)
            with strategy("shared"):
                fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
            loss = model(torch.ones(2, 4)).sum()
            if backward:
                loss.backward()
            found.append(weakref.ref(state_of(model).tree.turns.of(group)))  # pyright: ignore
        destroy_process_group(group)
        return found

    found = run_ranks(2, body)
    gc.collect()  # not by threads, which skip it where another one is at it
    assert [[turns() for turns in each] for each in found] == [[None, None]] * 2


@on_ranks(2)
def test_shards_of_a_group_that_is_gathered_from_now_on_leave_the_shared_memory(rank: int) -> None:
    """Before its first forward, too."""

    model: Any = nn.Linear(4, 4)
    with strategy("shared"):
        fully_shard(model)
    shared = model.weight.to_local().data_ptr()
    model.set_custom_all_gather(object())  # never called
    assert model.weight.to_local().data_ptr() != shared
