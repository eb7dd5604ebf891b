"""DDP's behaviour between ranks, on thread-ranks: what it sends, verifies, refuses and survives."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError, PeerLost
from dure.parallel.ddp.replicate import replicate
from dure.testing import CommRecorder, run_ranks
from dure.training.precision import MixedPrecision
from tests.parallel.ddp.ddp_models import Branches
from tests.thread_ranks import on_ranks


def linear() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


def test_step_is_one_reduction_a_bucket_and_nothing_else_2_ranks() -> None:
    def rank_main(rank: int) -> list[str]:
        layers = [nn.Linear(64, 64) for _ in range(4)]  # 16640 bytes a layer
        ddp = dist.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.03)
        with CommRecorder(rank=rank) as seen:
            for _ in range(2):
                with ddp.no_sync():
                    ddp(torch.ones(1, 64)).sum().backward()
                ddp(torch.ones(1, 64)).sum().backward()
        return seen.ops

    # Once, rank 0 sends the order in which gradients became ready.
    step = ["all_reduce"] * 2
    assert run_ranks(2, rank_main) == [[*step, "broadcast", *step]] * 2


def test_ignored_parameters_are_neither_broadcast_nor_reduced_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[float, ...]:
        module: Any = Branches()
        module.right.weight.data.fill_(rank)
        module._ddp_params_and_buffers_to_ignore = ["right.weight"]
        ddp = dist.DistributedDataParallel(module)
        ddp(torch.full((1, 2), rank + 1.0), "left", "right").backward()
        right = module.right.weight
        return tuple(t[0, 0].item() for t in (right, right.grad, module.left.weight.grad))

    assert run_ranks(2, rank_main) == [(0.0, 1.0, 1.5), (1.0, 2.0, 1.5)]


@on_ranks(1)
def test_no_sync_is_undone_when_its_body_raises_1_rank(rank: int) -> None:
    ddp = dist.DistributedDataParallel(linear())
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    assert ddp.require_backward_grad_sync


@on_ranks(2)
def test_copy_and_pickle_come_back_working_2_ranks(rank: int) -> None:
    ddp = dist.DistributedDataParallel(linear())
    ddp(torch.ones(1, 1)).sum().backward()
    for other in (pickle.loads(pickle.dumps(ddp)), copy.deepcopy(ddp)):
        assert list(other.state_dict()) == ["module.weight"]
        assert torch.equal(other.module.weight, ddp.module.weight)
        other.zero_grad()
        other(torch.full((1, 1), rank + 1.0)).sum().backward()
        assert other.module.weight.grad.item() == 1.5
    assert ddp.module.weight.grad.item() == 1


@on_ranks(2)
def test_copy_of_a_module_on_another_group_is_refused_2_ranks(rank: int) -> None:
    ddp = dist.DistributedDataParallel(linear(), process_group=dist.new_group([0, 1]))
    with pytest.raises(ModuleError):
        copy.deepcopy(ddp)


@on_ranks(2)
def test_backward_on_another_thread_uses_the_ranks_group_2_ranks(rank: int) -> None:
    ddp = dist.DistributedDataParallel(linear())
    thread = threading.Thread(target=ddp(torch.full((1, 1), rank + 1.0)).sum().backward)
    thread.start()
    thread.join()
    assert ddp.module.weight.grad.item() == 1.5


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_is_accepted_1_rank() -> None:
    def rank_main(rank: int) -> list[float]:
        ddp: Any = dist.DistributedDataParallel(linear())
        values: list[float] = []
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.full((1, 1), 2.0)).pow(2).sum().backward(create_graph=True)
            values.append((ddp.module.weight.grad / ddp.module.weight).item())
        return values

    assert run_ranks(1, rank_main)[0] == pytest.approx([8.0] * 3)


def test_rank_that_leaves_is_named_by_backward_2_ranks() -> None:
    def rank_main(rank: int) -> int | None:
        ddp = dist.DistributedDataParallel(linear())
        if rank == 1:
            return None
        with pytest.raises(PeerLost) as caught:
            ddp(torch.ones(1, 1)).sum().backward()
        return caught.value.peer

    assert run_ranks(2, rank_main) == [1, None]


@on_ranks(2)
def test_module_outlives_its_group_only_wrapped_again_2_ranks(rank: int) -> None:
    ddp = dist.DistributedDataParallel(linear())
    ddp(torch.ones(1, 1)).sum().backward()
    dist.shrink()
    with pytest.raises(ModuleError):
        ddp(torch.ones(1, 1))
    ddp = dist.DistributedDataParallel(ddp.module)
    ddp(torch.ones(1, 1)).sum().backward()


# --------------------------------------------------------------------------------------------------
# Forwards and backwards that Ctrl-C or `SystemExit` leaves: the next step is right.


class Net(nn.Module):
    """y = a * x, or raises `error`; counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.zeros(1))
        self.error: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.error is not None:
            raise self.error
        return self.a * x


WRAPPERS: dict[str, Callable[[Net], Any]] = {
    "plain": dist.DistributedDataParallel,
    "unused": lambda net: dist.DistributedDataParallel(net, find_unused_parameters=True),
    "precision": lambda net: dist.DistributedDataParallel(
        net, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    ),
    "replicate": replicate,
}


def check_step(model: Any, net: Net, rank: int) -> None:
    model.zero_grad()
    model(torch.tensor([2.0, 4.0]) * (1 + 2 * rank)).sum().backward()
    assert net.a.grad.tolist() == [4.0, 8.0]  # the average of 1 and 3 times


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_after_an_interrupt_a_step_is_right(kind: str, error: type[BaseException]) -> None:
    def body(rank: int) -> None:
        net = Net()
        model = WRAPPERS[kind](net)
        check_step(model, net, rank)
        net.error = error
        with pytest.raises(error):
            model(torch.ones(2))
        net.error = None
        check_step(model, net, rank)

        def interrupt(_: torch.Tensor) -> None:
            raise error

        out = model(torch.ones(2))
        out.register_hook(interrupt)
        with pytest.raises(error):
            out.sum().backward()
        check_step(model, net, rank)

    run_ranks(2, body)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_no_sync_ends_when_it_is_left_by_an_interrupt(error: type[BaseException]) -> None:
    def body(rank: int) -> None:
        net = Net()
        model = dist.DistributedDataParallel(net)
        net.error = error
        with pytest.raises(error), model.no_sync():
            model(torch.ones(2))
        net.error = None
        check_step(model, net, rank)

    run_ranks(2, body)


class Skips(nn.Module):
    """y = a * x, or x."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        return x * 1 if skip else self.a * x


def test_a_replicated_module_that_is_called_in_an_except_block_sees_its_backward() -> None:
    """As a forward that is tried again with less, after it ran out of memory."""

    def body(rank: int) -> None:
        net: Any = replicate(Skips(), find_unused_parameters=True)
        try:
            raise MemoryError
        except MemoryError:
            out = net(torch.tensor([2.0, 4.0], requires_grad=True), rank == 1)
        out.sum().backward()
        assert net.a.grad.tolist() == [1.0, 2.0]  # half of rank 0's: rank 1 has none

    run_ranks(2, body)
