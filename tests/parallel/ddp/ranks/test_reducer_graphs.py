"""DDP's gradients for all shapes of modules and graphs: against what each rank would get alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dure as dist
from dure.errors import ModuleError
from dure.testing import CommRecorder, run_ranks
from tests.parallel.ddp.ddp_models import gradients
from tests.thread_ranks import on_ranks


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


class Heads(nn.Module):
    """Two outputs from one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(2, 2), nn.ModuleList(nn.Linear(2, 1) for _ in "ab")

    def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        y = self.body(x)
        return {"heads": [head(y) for head in self.heads]}


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


class TwoDtypes(nn.Module):
    """Layers of different dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(2, 5), nn.Linear(5, 6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(x).tanh().double())


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


def one_of_two_outputs(module: nn.Module, rank: int) -> None:
    module(inputs(rank))["heads"][1].sum().backward()


def two_outputs_in_turn(module: nn.Module, rank: int) -> None:
    for output in module(inputs(rank))["heads"]:
        output.sum().backward(retain_graph=True)


def gradient_penalty(module: nn.Module, rank: int) -> None:
    x = inputs(rank)
    out = module(x).sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + slope.pow(2).sum()).backward()


STATIC: dict[str, Any] = {"static_graph": True}
UNUSED: dict[str, Any] = {"find_unused_parameters": True}


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize(
    ("n", "make", "backward", "options"),
    [
        (1, two_layers, accumulated, {}),
        (3, two_layers, accumulated, {}),
        (16, two_layers, plain, {}),
        (3, Tied, plain, {}),
        (3, TwoDtypes, plain, {}),
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
        (2, Heads, one_of_two_outputs, UNUSED),
        (2, Heads, two_outputs_in_turn, UNUSED),
    ],
)
def test_gradients_are_the_mean_of_what_each_rank_would_get_alone(
    n: int,
    make: Callable[[], nn.Module],
    backward: Callable[[Any, int], None],
    options: dict[str, Any],
) -> None:
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


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
@on_ranks(3)
def test_gradients_of_any_dtype_are_averaged_exactly_3_ranks(rank: int, dtype: torch.dtype) -> None:
    module = nn.Linear(5, 1, bias=False, dtype=dtype)
    out = dist.DistributedDataParallel(module)(torch.full((1, 5), 3 * rank + 3, dtype=dtype))
    (out.real if dtype.is_complex else out).sum().backward()
    assert module.weight.grad.flatten().tolist() == [6] * 5


def autograd_grad(ddp: Any, rank: int) -> None:
    x = inputs(rank)
    torch.autograd.grad(ddp(x).sum(), [x, *ddp.parameters()])
    torch.autograd.grad(ddp(x).sum(), x)


@pytest.mark.parametrize(("backward", "reductions"), [(gradient_penalty, 1), (autograd_grad, 0)])
@on_ranks(2)
def test_only_backwards_that_fill_gradients_reduce_2_ranks(
    rank: int, backward: Callable[[Any, int], None], reductions: int
) -> None:
    ddp = dist.DistributedDataParallel(two_layers())
    with CommRecorder() as seen:
        backward(ddp, rank)
    plain(ddp, rank)
    assert seen.ops == ["all_reduce"] * reductions


def test_reentrant_checkpoints_of_shared_layers_without_static_graph_are_named_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[str, ...]:
        ddp: Any = dist.DistributedDataParallel(Checkpointed(True, 3), bucket_cap_mb=1e-6)
        with pytest.raises(ModuleError) as caught:
            plain(ddp, rank)
        ddp.module.reentrant = False
        ddp.zero_grad()
        plain(ddp, rank)
        assert "static_graph=True" in caught.value.fix
        return caught.value.parameters

    for names in run_ranks(2, rank_main):
        assert "second.bias" in names


def test_graph_that_changes_under_static_graph_is_named_on_all_ranks_3_ranks() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.never, self.here = (nn.Linear(1, 1, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor, *also: str) -> torch.Tensor:
            return self.always(x) + sum(getattr(self, name)(x) for name in also)

    def rank_main(rank: int) -> list[tuple[str, ...]]:
        ddp = dist.DistributedDataParallel(Switch(), bucket_cap_mb=1e-6, **STATIC)
        x, usual = torch.ones(1, 1), ("here",) if rank == 0 else ()
        for _ in range(2):
            ddp(x, *usual).backward()
        named: list[tuple[str, ...]] = []
        for unusual in [(*usual, "never"), ()]:
            with pytest.raises(ModuleError) as caught:
                ddp(x, *(unusual if rank == 0 else usual)).backward()
            named.append(caught.value.parameters)
            assert "on rank 0" in caught.value.seen
        ddp.zero_grad()
        ddp(x, *usual).backward()
        here, never = (ddp.module.get_parameter(f"{name}.weight") for name in ("here", "never"))
        assert never.grad is None
        assert here.grad.item() == pytest.approx(1 / 3)
        return named

    assert run_ranks(3, rank_main) == [[("never.weight",), ("here.weight",)]] * 3


def test_exception_in_backward_is_an_error_on_all_ranks_and_the_next_step_is_good_3_ranks() -> None:
    class Trap(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, armed: bool) -> torch.Tensor:
            ctx.armed = armed
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            if ctx.armed:
                raise KeyError("the user's own")
            return grads[0], None

    class Trapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor, armed: bool) -> Any:
            return self.above(Trap.apply(self.below(x), armed))

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
def test_parameter_frozen_on_one_rank_only_is_named_on_all_2_ranks(rank: int) -> None:
    ddp = dist.DistributedDataParallel(two_layers())
    ddp.module[0].bias.requires_grad_(rank == 0)
    plain(ddp, rank)
    with pytest.raises(ModuleError) as caught:
        plain(ddp, rank)
    assert caught.value.parameters == ("0.bias",)


def test_buckets_follow_rank_0s_order_and_carry_gradients_over_2_ranks() -> None:
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


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@on_ranks(2)
def test_buckets_stay_as_they_are_if_parameters_may_be_unused_2_ranks(rank: int) -> None:
    ddp = dist.DistributedDataParallel(two_layers(), bucket_cap_mb=1e-6, **UNUSED)
    with CommRecorder() as seen:
        for _ in range(2):
            plain(ddp, rank)
    assert not ddp._get_ddp_logging_data()["has_rebuilt_buckets"]
    assert seen.ops == ["all_reduce"] * 8


def test_unused_parameters_do_not_hold_up_other_buckets_2_ranks() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.above(self.below(x))

    def rank_main(rank: int) -> tuple[list[int], list[str]]:
        ddp = dist.DistributedDataParallel(Partly(), bucket_cap_mb=1e-6, **UNUSED)
        plain(ddp, rank)
        started: list[int] = []
        with CommRecorder() as seen:
            out = ddp(torch.ones(1, 2))
            ddp.module.below.weight.register_hook(lambda _: started.append(len(seen.ops)))
            out.sum().backward()
        return started, seen.ops

    # Those of the unused parameters and of the layer above were under way before the last one.
    assert run_ranks(2, rank_main) == [([3], ["all_reduce"] * 4)] * 2
