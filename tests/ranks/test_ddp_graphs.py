"""DDP and the shapes that a training graph can have: checkpoints, several passes, changes."""

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

OFTEN = 3


class Layers(nn.Module):
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


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def check(
    make: Callable[[], nn.Module], backward: Callable[[Any, int], None], **options: Any
) -> None:
    """Compare three steps' gradients on two ranks with the mean of what each would get alone."""
    torch.manual_seed(1)
    module = make()
    replicas = [copy.deepcopy(module) for _ in range(2)]
    alone: list[list[torch.Tensor]] = []
    for rank in range(2):
        module.zero_grad()
        backward(module, rank)
        alone.append(gradients(module))

    def rank_main(rank: int) -> None:
        ddp = dist.DistributedDataParallel(replicas[rank], bucket_cap_mb=1e-6, **options)
        for _ in range(3):
            ddp.zero_grad()
            backward(ddp, rank)
            for got, a, b in zip(gradients(ddp), *alone, strict=True):
                torch.testing.assert_close(got, (a + b) / 2)

    run_ranks(2, rank_main)


def plain(module: nn.Module, rank: int) -> None:
    x = torch.full((1, 2), rank + 1.0, requires_grad=True)
    module(x).sum().backward()


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize(("reentrant", "times"), [(False, 1), (False, OFTEN), (True, 1)])
def test_checkpoints_2_ranks(reentrant: bool, times: int, static_graph: bool) -> None:
    check(lambda: Layers(reentrant, times), plain, static_graph=static_graph)


def test_reentrant_checkpoints_of_shared_layers_with_static_graph_2_ranks() -> None:
    check(lambda: Layers(True, OFTEN), plain, static_graph=True)


def test_reentrant_checkpoints_with_unused_parameters_2_ranks() -> None:
    def make() -> nn.Module:
        module = Layers(True, 1)
        module.register_parameter("unused", nn.Parameter(torch.ones(1)))
        return module

    check(make, plain, find_unused_parameters=True)
    check(make, plain, static_graph=True)


def test_reentrant_checkpoints_of_shared_layers_without_static_graph_are_named_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[str, ...]:
        ddp = dist.DistributedDataParallel(Layers(True, OFTEN), bucket_cap_mb=1e-6)
        with pytest.raises(ModuleError) as caught:
            plain(ddp, rank)
        ddp.module.reentrant = False
        ddp.zero_grad()
        plain(ddp, rank)
        assert "static_graph=True" in str(caught.value)
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
        ddp = dist.DistributedDataParallel(Switch(), static_graph=True, bucket_cap_mb=1e-6)
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
        assert len(list(ddp.reducer.views())) == 2  # the one that nobody used is not reduced
        here, never = (ddp.module.get_parameter(f"{name}.weight") for name in ("here", "never"))
        assert never.grad is None
        assert here.grad is not None
        assert here.grad.item() == pytest.approx(1 / 3)
        return named

    assert run_ranks(3, rank_main) == [[("never.weight",), ("here.weight",)]] * 3


def test_static_graph_with_accumulation_2_ranks() -> None:
    def backward(module: nn.Module, rank: int) -> None:
        if isinstance(module, dist.DistributedDataParallel):
            with module.no_sync():  # pyright: ignore[reportCallIssue]
                plain(module, rank + 5)
        else:
            plain(module, rank + 5)
        plain(module, rank)

    check(lambda: Layers(True, OFTEN), backward, static_graph=True)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def test_several_forwards_before_one_backward_2_ranks() -> None:
    def backward(module: nn.Module, rank: int) -> None:
        outputs = [module(torch.full((1, 2), float(rank + i))) for i in range(3)]
        torch.stack(outputs).sum().backward()

    check(two_layers, backward)


def test_several_forwards_and_as_many_backwards_2_ranks() -> None:
    def backward(module: nn.Module, rank: int) -> None:
        outputs = [module(torch.full((1, 2), float(rank + i))) for i in range(3)]
        for output in reversed(outputs):
            output.sum().backward()

    check(two_layers, backward)


def test_backward_twice_through_one_graph_2_ranks() -> None:
    def backward(module: nn.Module, rank: int) -> None:
        loss = module(torch.full((1, 2), rank + 1.0)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    check(two_layers, backward)


def test_backward_of_one_of_several_outputs_2_ranks() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = nn.Linear(2, 2), nn.ModuleList(nn.Linear(2, 1) for _ in "ab")

        def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            y = self.body(x)
            return {"heads": [head(y) for head in self.heads]}

    def one_head(module: nn.Module, rank: int) -> None:
        module(torch.full((1, 2), rank + 1.0))["heads"][1].sum().backward()

    check(Heads, one_head, find_unused_parameters=True)

    def one_after_the_other(module: nn.Module, rank: int) -> None:
        for output in module(torch.full((1, 2), rank + 1.0))["heads"]:
            output.sum().backward(retain_graph=True)

    check(Heads, one_after_the_other, find_unused_parameters=True)


def test_gradient_penalty_reduces_once_2_ranks() -> None:
    def backward(module: nn.Module, rank: int) -> None:
        x = torch.full((1, 2), rank + 1.0, requires_grad=True)
        out = module(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.pow(2).sum()).backward()

    check(two_layers, backward)

    def rank_main(rank: int) -> list[str]:
        ddp = dist.DistributedDataParallel(two_layers())
        with CommRecorder() as seen:
            backward(ddp, rank)
        return seen.ops

    assert run_ranks(2, rank_main) == [["all_reduce"]] * 2


def test_autograd_grad_of_parameters_reduces_nothing_2_ranks() -> None:
    def rank_main(rank: int) -> list[str]:
        ddp = dist.DistributedDataParallel(two_layers())
        x = torch.full((1, 2), rank + 1.0, requires_grad=True)
        with CommRecorder() as seen:
            torch.autograd.grad(ddp(x).sum(), [x, *ddp.parameters()])
            torch.autograd.grad(ddp(x).sum(), x)
        plain(ddp, rank)
        return seen.ops

    assert run_ranks(2, rank_main) == [[]] * 2


def test_exception_in_backward_is_told_to_all_ranks_and_the_next_step_is_good_3_ranks() -> None:
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
        ddp = dist.DistributedDataParallel(Trapped(), bucket_cap_mb=1e-6)
        seen: list[Any] = []
        for step in range(4):
            ddp.zero_grad()
            loss = ddp(torch.full((1, 1), rank + 1.0), step == 2 and rank == 1)
            try:
                loss.backward()
            except KeyError:
                seen.append("own")
            except ModuleError as error:
                seen.append(error.seen)
            else:
                seen.append((ddp.module.below.weight.grad / ddp.module.above.weight).item())
        return seen

    good = [pytest.approx(2.0)] * 2
    results = run_ranks(3, rank_main)
    assert results[0] == [*good, "rank 1", pytest.approx(2.0)]
    assert results[1] == [*good, "own", pytest.approx(2.0)]
    assert results[2] == results[0]


def test_parameter_frozen_on_one_rank_only_is_named_on_all_2_ranks() -> None:
    def rank_main(rank: int) -> tuple[str, ...]:
        ddp = dist.DistributedDataParallel(two_layers())
        ddp.module[0].bias.requires_grad_(rank == 0)
        plain(ddp, rank)
        with pytest.raises(ModuleError) as caught:
            plain(ddp, rank)
        return caught.value.parameters

    assert run_ranks(2, rank_main) == [("0.bias",)] * 2


def test_buckets_follow_rank_0s_order_and_carry_gradients_over_2_ranks() -> None:
    class Crossed(nn.Module):
        """Rank 0 uses the layers in one order, rank 1 in the other."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor, backwards: bool) -> torch.Tensor:
            for layer in reversed(self.layers) if backwards else self.layers:
                x = layer(x)
            return x

    def rank_main(rank: int) -> list[Any]:
        ddp = dist.DistributedDataParallel(Crossed(), bucket_cap_mb=1e-6)
        before = [view.name for view in ddp.reducer.views()]
        x = torch.ones(1, 1)
        ddp(x, rank == 0).backward()
        kept = [p.grad for p in ddp.parameters() if p.grad is not None]
        values = [g.clone() for g in kept]
        ddp(x, rank == 0).backward()  # added to the gradients of the first step
        after = [view.name for view in ddp.reducer.views()]
        for p, once, first in zip(ddp.parameters(), kept, values, strict=True):
            torch.testing.assert_close(p.grad, 2 * first)
            assert once is not p.grad
        sizes = ddp._get_ddp_logging_data()  # pyright: ignore[reportPrivateUsage]
        assert sizes["has_rebuilt_buckets"] == 1
        return [before, after, sizes["rebuilt_per_bucket_param_indices"]]

    names = [f"layers.{i}.weight" for i in range(3)]
    assert run_ranks(2, rank_main) == [[names[::-1], names, "0, 1, 2"]] * 2


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
def test_buckets_stay_where_parameters_may_be_unused_2_ranks() -> None:
    def rank_main(rank: int) -> list[str]:
        ddp = dist.DistributedDataParallel(
            two_layers(), bucket_cap_mb=1e-6, find_unused_parameters=True
        )
        with CommRecorder() as seen:
            for _ in range(2):
                plain(ddp, rank)
        assert not ddp.reducer.rebuilt
        return seen.ops

    assert run_ranks(2, rank_main) == [["all_reduce"] * 8] * 2


def test_unused_parameters_do_not_hold_up_other_buckets_2_ranks() -> None:
    order: list[str] = []

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.below(x)
            y.register_hook(lambda _: order.append("below"))
            return self.above(y)

    def rank_main(rank: int) -> list[str]:
        ddp = dist.DistributedDataParallel(Noted(), bucket_cap_mb=1e-6, find_unused_parameters=True)
        plain(ddp, rank)
        with CommRecorder() as seen:
            out = ddp(torch.ones(1, 2))
            seen_at: list[int] = []
            ddp.module.below.weight.register_post_accumulate_grad_hook(
                lambda _: seen_at.append(len(seen.ops))
            )
            out.sum().backward()
        # Those of the unused parameters and of the layer above were under way.
        assert seen_at == [3]
        return seen.ops

    assert run_ranks(2, rank_main) == [["all_reduce"] * 4] * 2
