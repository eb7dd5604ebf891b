"""DDP's gradients: for all shapes of graphs, with hooks of the program, after moves."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dure as dist
from dure.errors import ModuleError
from dure.parallel.ddp import DistributedDataParallel
from dure.testing import run_ranks
from tests.parallel.ddp.ddp_models import gradients
from tests.profiles import names_in, profile_of, steps_of
from tests.thread_ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters")

# ---------------------------------------------------------------- graphs


class Checkpointed(nn.Module):
    """Layers, some of them used several times, computed in checkpoints."""

    def __init__(self, reentrant: bool, times: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.reentrant, self.times = reentrant, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            for layer in (self.first, self.second):
                x = checkpoint(layer, x, use_reentrant=self.reentrant)  # pyright: ignore
        return x


class Tied(nn.Module):
    """Decoder and encoder share one weight; a bias is frozen; one parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(2, 2), nn.Linear(2, 2)
        self.decoder.weight = self.encoder.weight
        self.encoder.bias.requires_grad_(False)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.relu(self.encoder(x))) + self.nothing.sum()


def convolution() -> nn.Module:
    """A weight in channels-last order."""
    conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Unflatten(1, (2, 1, 1)), conv, nn.Flatten(), nn.Linear(4, 6))


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def with_an_unused_parameter() -> nn.Module:
    module = Checkpointed(True, 1)
    module.register_parameter("unused", nn.Parameter(torch.ones(1)))
    return module


def inputs(rank: float) -> torch.Tensor:
    return torch.full((1, 2), rank + 1.0, requires_grad=True)


def plain(module: nn.Module, rank: int) -> None:
    module(inputs(rank)).sum().backward()


def accumulated(module: nn.Module, rank: int) -> None:
    if isinstance(module, dist.DistributedDataParallel):
        with module.no_sync():
            plain(module, rank + 5)
    else:
        plain(module, rank + 5)
    plain(module, rank)


def three_forwards_one_backward(module: nn.Module, rank: int) -> None:
    torch.stack([module(inputs(rank + i)) for i in range(3)]).sum().backward()


def three_forwards_three_backwards(module: nn.Module, rank: int) -> None:
    for output in reversed([module(inputs(rank + i)) for i in range(3)]):
        output.sum().backward()


def one_graph_twice(module: nn.Module, rank: int) -> None:
    loss = module(inputs(rank)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_penalty(module: nn.Module, rank: int) -> None:
    x = inputs(rank)
    out = module(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + slope.pow(2).sum()).backward()


STATIC: dict[str, Any] = {"static_graph": True}
UNUSED: dict[str, Any] = {"find_unused_parameters": True}


@pytest.mark.parametrize(
    ("n", "make", "backward", "options"),
    [
        (1, two_layers, accumulated, {}),
        (3, two_layers, accumulated, {}),
        (16, two_layers, plain, {}),
        (3, Tied, plain, {}),
        (5, convolution, plain, {}),
        (2, lambda: Checkpointed(False, 1), plain, {}),
        (2, lambda: Checkpointed(False, 3), plain, STATIC),
        (2, lambda: Checkpointed(False, 3), plain, {}),
        (2, lambda: Checkpointed(True, 1), plain, {}),
        (2, lambda: Checkpointed(True, 3), plain, STATIC),
        (2, lambda: Checkpointed(True, 3), accumulated, STATIC),
        (2, with_an_unused_parameter, plain, UNUSED),
        (2, with_an_unused_parameter, plain, STATIC),
        (2, two_layers, three_forwards_one_backward, {}),
        (2, two_layers, three_forwards_three_backwards, {}),
        (2, two_layers, one_graph_twice, {}),
        (2, two_layers, gradient_penalty, {}),
    ],
)
def test_gradients_are_the_mean_of_what_each_rank_would_get_alone(n, make, backward, options):
    torch.manual_seed(1)
    module = make()
    replicas = [copy.deepcopy(module) for _ in range(n)]
    alone: list[list[torch.Tensor]] = []
    for rank in range(n):
        module.zero_grad()
        backward(module, rank)
        alone.append(gradients(module))
    expected = [torch.stack(each).mean(0) for each in zip(*alone, strict=True)]

    def rank_main(rank: int) -> None:
        with torch.no_grad():
            for parameter in replicas[rank].parameters():
                parameter.add_(rank)  # wrapping gives all ranks the values of rank 0
        ddp = dist.DistributedDataParallel(replicas[rank], bucket_cap_mb=1e-6, **options)
        for _ in range(3):
            ddp.zero_grad()
            backward(ddp, rank)
            torch.testing.assert_close(gradients(ddp), expected)

    run_ranks(n, rank_main)


def test_exception_in_backward_is_an_error_on_all_ranks_and_the_next_step_is_good_3_ranks():
    def fail(_: torch.Tensor) -> None:
        raise KeyError("the user's own")

    class Trapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor, armed: bool) -> Any:
            y = self.below(x)
            if armed:
                y.register_hook(fail)
            return self.above(y)

    def rank_main(rank: int) -> list[Any]:
        ddp: Any = dist.DistributedDataParallel(Trapped(), bucket_cap_mb=1e-6)
        seen: list[Any] = []
        for step in range(3):
            ddp.zero_grad()
            loss = ddp(torch.full((1, 1), rank + 1.0), step == 1 and rank == 1)
            try:
                loss.backward()
            except KeyError:
                seen.append("own")
            except ModuleError as error:
                seen.append(error.seen)
            else:
                seen.append((ddp.module.below.weight.grad / ddp.module.above.weight).item())
        return seen

    good = pytest.approx(2.0)
    others = [good, "rank 1", good]
    assert run_ranks(3, rank_main) == [others, [good, "own", good], others]


@on_ranks(2)
def test_parameter_frozen_on_one_rank_only_is_named_on_all_2_ranks(rank):
    ddp = dist.DistributedDataParallel(two_layers())
    ddp.module[0].bias.requires_grad_(rank == 0)
    plain(ddp, rank)
    with pytest.raises(ModuleError) as caught:
        plain(ddp, rank)
    assert caught.value.parameters == ("0.bias",)


def test_buckets_follow_rank_0s_order_and_carry_gradients_over_2_ranks():
    class Crossed(nn.Module):
        """Uses its layers in one order or in the other."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor, backwards: bool) -> torch.Tensor:
            for layer in reversed(self.layers) if backwards else self.layers:
                x = layer(x)
            return x

    def rank_main(rank: int) -> object:
        ddp = dist.DistributedDataParallel(Crossed(), bucket_cap_mb=1e-6)
        x = torch.ones(1, 1)
        ddp(x, rank == 0).backward()
        kept = [p.grad for p in ddp.parameters()]
        values = gradients(ddp)
        ddp(x, rank == 0).backward()  # added to the gradients of the first step
        for p, once, first in zip(ddp.parameters(), kept, values, strict=True):
            torch.testing.assert_close(p.grad, 2 * first)
            assert once is not p.grad
        return ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]

    assert run_ranks(2, rank_main) == ["0, 1, 2"] * 2


# ---------------------------------------------------------------- hooks of the program


def linear() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def backward(module: nn.Module, rank: int) -> None:
    module(torch.ones(1, 1) * (rank + 1)).sum().backward()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "reduced in bfloat16": {"mixed_precision": dist.MixedPrecision(reduce_dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_before", [True, False], ids=["before wrapping", "after"])
@on_ranks(2)
def test_optimizer_within_backward_steps_with_the_average_2_ranks(rank, options, is_before):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(weight: torch.Tensor) -> None:
        assert not torch.is_grad_enabled()
        optimizer.step()
        weight.grad = None

    handle = model.weight.register_post_accumulate_grad_hook(step) if is_before else None
    ddp = dist.DistributedDataParallel(model, **OPTIONS[options])
    if handle is None:
        handle = model.weight.register_post_accumulate_grad_hook(step)
    values: list[float] = []
    for _ in range(3):
        backward(ddp, rank)
        assert model.weight.grad is None
        values.append(model.weight.item())
    handle.remove()
    backward(ddp, rank)
    assert model.weight.grad is not None and model.weight.grad.item() == 1.5
    assert [*values, model.weight.item()] == [0.25, -0.5, -1.25, -1.25]


def seen_by_hooks(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> tuple[Any, list[float]]:
    """Return a wrapped layer, and the list to which a hook of its weight adds gradients."""
    model, seen = linear(), []
    model.weight.register_post_accumulate_grad_hook(lambda w: seen.append(w.grad.item()))
    return wrap(model), seen


@on_ranks(2)
def test_hooks_wait_for_the_reduction_of_kept_sums_2_ranks(rank):
    ddp, seen = seen_by_hooks(rank, dist.DistributedDataParallel)
    with ddp.no_sync():
        backward(ddp, rank)
        backward(ddp, rank)
    assert seen == []
    backward(ddp, rank)
    assert seen == [4.5]
    with ddp.no_sync():
        backward(ddp, rank)
    ddp.reduce_gradients()
    assert seen == [4.5, 6.0]

    # In the second step rank 0 adds nothing to rank 1's gradient of 2.


def test_hooks_do_not_run_in_a_step_that_fails_2_ranks():
    def rank_main(rank: int) -> list[float]:
        def wrap(layer: nn.Module) -> nn.Module:
            both = nn.ModuleList([layer, linear()])
            both.forward = layer.forward  # type: ignore[method-assign]
            return dist.DistributedDataParallel(both)

        ddp, seen = seen_by_hooks(rank, wrap)
        with pytest.raises(ModuleError):
            backward(ddp, rank)
        return seen

    assert run_ranks(2, rank_main) == [[], []]


# ---------------------------------------------------------------- modules that were moved


MEAN = [[6.0, 9.0], [6.0, 9.0]]

WAYS: dict[str, Callable[[nn.Module], object]] = {
    "dtype and back": lambda m: m.double().float(),
    "other memory": lambda m: m._apply(lambda t: t.clone()),
    "to the same": lambda m: m.to("cpu", torch.float32),
}


@pytest.fixture(params=[False, True], ids=["data", "swap"])
def swap(request: pytest.FixtureRequest) -> Iterator[bool]:
    """How torch changes parameters: it assigns `data`, or swaps the tensors (as for DTensors)."""
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield request.param
    torch.__future__.set_swap_module_params_on_conversion(False)


def rows(rank: int) -> torch.Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)


def step(ddp: nn.Module, rank: int) -> None:
    ddp(rows(rank).to(next(ddp.parameters()).dtype)).sum().backward()


def gradient(ddp: nn.Module) -> list[list[float]]:
    weight = next(ddp.parameters())
    assert weight.grad is not None
    return weight.grad.tolist()


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2)
def test_moved_module_goes_on_averaging_2_ranks(rank, options, swap):
    for way, set_to_none in itertools.product(WAYS, (True, False)):
        ddp = dist.DistributedDataParallel(nn.Linear(2, 2), **OPTIONS[options])
        for _ in range(3):
            step(ddp, rank)
            ddp.zero_grad(set_to_none)
        WAYS[way](ddp)
        for _ in range(2):
            step(ddp, rank)
            assert gradient(ddp) == MEAN, (way, set_to_none)
            ddp.zero_grad(set_to_none)


@on_ranks(2)
def test_part_that_was_moved_goes_on_averaging_2_ranks(rank, swap):
    way = "dtype and back"
    ddp = dist.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with torch.no_grad():
        for p in ddp.parameters():
            p.fill_(1)
    step(ddp, rank)
    ddp.zero_grad(set_to_none=False)
    WAYS[way](ddp.module[0])
    step(ddp, rank)
    assert gradient(ddp) == [[12.0, 18.0], [12.0, 18.0]]


@pytest.mark.parametrize(
    ("who", "kept", "options"),
    [((0, 1), False, "plain"), ((1,), True, "unused"), ((1,), False, "plain")],
    ids=["all", "one rank, with a sum", "one rank"],
)
@on_ranks(2)
def test_module_left_in_another_dtype_is_refused_on_all_ranks_2_ranks(
    rank, who, kept, options, swap
):
    ddp = dist.DistributedDataParallel(nn.Linear(2, 2), **OPTIONS[options])
    step(ddp, rank)
    ddp.zero_grad()
    with ddp.no_sync() if kept else nullcontext():
        step(ddp, rank)
    if rank in who:
        ddp.double()
    with pytest.raises(ModuleError) as caught:
        step(ddp, rank)
    assert "Wrap the module again" in str(caught.value)
    assert set(caught.value.parameters) == {"weight", "bias"}
    assert f"on rank {', '.join(map(str, who))})" in caught.value.seen
    ddp.float()
    ddp.zero_grad()
    step(ddp, rank)
    assert gradient(ddp) == MEAN


@on_ranks(2)
def test_replaced_parameter_is_refused_although_it_may_be_unused_2_ranks(rank):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    ddp = dist.DistributedDataParallel(model, **OPTIONS["unused"])
    step(ddp, rank)
    model[1].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ModuleError) as caught:
        step(ddp, rank)
    assert caught.value.parameters == ("1.weight",)


# ---------------------------------------------------------------- records


@on_ranks(2)
def test_forward_and_buckets_are_recorded(rank):
    layers = torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.0002)
    profile = profile_of(rank, steps_of(model))
    if rank == 0:
        names = names_in(profile)
        assert names.count("c10d::allreduce_") == 2
        # The last bucket is reduced at once if the other one has been.
        assert [n for n in names if n.startswith(("Distributed", "Optimizer"))] == [
            "DistributedDataParallel.forward",
            "DistributedDataParallel.reduce_bucket (0)",
            "DistributedDataParallel.reduce_bucket (1)",
            "DistributedDataParallel.wait_for_buckets",
            "Optimizer.step#SGD.step",
            "Optimizer.zero_grad#SGD.zero_grad",
        ]
