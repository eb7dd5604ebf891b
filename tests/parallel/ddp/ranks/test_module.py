"""DDP's module: what it sends, verifies, refuses and survives."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.parallel.ddp.replicate import replicate
from dure.testing import CommRecorder, run_ranks
from dure.training.precision import MixedPrecision
from tests.parallel.ddp.ddp_models import Branches
from tests.thread_ranks import on_ranks


def linear() -> nn.Linear:
    return nn.Linear(1, 1, bias=False)


def test_step_is_one_reduction_a_bucket_and_nothing_else_2_ranks():
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


def test_ignored_parameters_are_neither_broadcast_nor_reduced_2_ranks():
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
def test_no_sync_is_undone_when_its_body_raises_1_rank(rank):
    ddp = dist.DistributedDataParallel(linear())
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    assert ddp.require_backward_grad_sync


@pytest.mark.parametrize("precision", [None, MixedPrecision(param_dtype=torch.bfloat16)])
@on_ranks(2)
def test_copy_and_pickle_come_back_working_2_ranks(rank, precision):
    ddp = dist.DistributedDataParallel(linear(), mixed_precision=precision)
    ddp(torch.ones(1, 1)).sum().backward()
    for other in (pickle.loads(pickle.dumps(ddp)), copy.deepcopy(ddp)):
        assert list(other.state_dict()) == ["module.weight"]
        assert torch.equal(other.module.weight, ddp.module.weight)
        other.zero_grad()
        out = other(torch.full((1, 1), rank + 1.0))
        assert out.dtype == (torch.bfloat16 if precision else torch.float32)
        out.sum().backward()
        assert other.module.weight.grad.item() == 1.5
    assert ddp.module.weight.grad.item() == 1


@on_ranks(2)
def test_module_outlives_its_group_only_wrapped_again_2_ranks(rank):
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
def test_after_an_interrupt_a_step_is_right(kind, error):
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


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m[0].double(), "0.weight"),
        (lambda m: m.append(nn.Linear(1, 1)), "2.weight"),
        (lambda m: m[0].bias.requires_grad_(False), "0.bias"),
        (lambda m: m[1].register_buffer("extra", torch.ones(1)), "1.extra"),
        (lambda m: m.insert(0, nn.Identity()), "0.weight"),
    ],
    ids=["dtype", "count", "frozen", "buffer", "name"],
)
def test_any_difference_between_models_is_named_on_all_ranks_3_ranks(change, name):
    def rank_main(rank: int) -> ModuleError:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        if rank == 1:
            change(model)
        with pytest.raises(ModuleError) as caught:
            dist.DistributedDataParallel(model)
        return caught.value

    for error in run_ranks(3, rank_main):
        assert name in error.parameters
        assert "ranks 0, 2 have" in error.seen and "rank 1 has" in error.seen


@on_ranks(2)
def test_parameter_unfrozen_after_wrapping_is_named_2_ranks(rank):
    module = Branches()
    module.right.requires_grad_(False)
    ddp = dist.DistributedDataParallel(module)
    ddp(torch.ones(1, 2), "left").backward()
    module.right.requires_grad_(True)
    with pytest.raises(ModuleError) as caught:
        ddp(torch.ones(1, 2), "left")
    dist.DistributedDataParallel(ddp.module)(torch.ones(1, 2), "left", "right").backward()
    assert caught.value.parameters == ("right.weight",)


def one_replaced(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.ones(1, 1))


def all_replaced(module: nn.Linear) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


@pytest.mark.parametrize(
    ("replace", "names"), [(one_replaced, ("weight",)), (all_replaced, ("weight", "bias"))]
)
@on_ranks(2)
def test_parameters_replaced_for_good_are_named_2_ranks(rank, replace, names):
    module = nn.Linear(1, 1)
    ddp = dist.DistributedDataParallel(module)
    replace(module)
    with pytest.raises(ModuleError) as caught:
        ddp(torch.ones(1, 1)).sum().backward()
    assert caught.value.parameters == names
