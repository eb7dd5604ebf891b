"""Fully sharded training on n ranks against plain training on one: losses, gradients, weights."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from dure.device_mesh import init_device_mesh
from dure.errors import MeshError, ModuleError, UsageError
from dure.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    strategy,
)
from dure.tensor import DTensor, Replicate, Shard
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dure.tensor.placement_types import StridedShard
from dure.testing import run_ranks
from ranks.fsdp_models import (
    Net,
    batch,
    by_step,
    compare,
    loss_of,
    made,
    making,
    mine,
    shard,
    whole,
)


@pytest.fixture(params=["gathered", "shared"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_training_equals_one_rank(way: str, size: int) -> None:
    compare(way, size)


def test_only_the_root(way: str) -> None:
    compare(way, 3, prepare=fully_shard)


def test_lists_of_modules(way: str) -> None:
    def prepare(model: Net) -> None:
        fully_shard([model.blocks[0], model.blocks[1]])
        fully_shard([model.blocks[2], model.head])
        fully_shard(model)

    compare(way, 2, prepare=prepare)


def test_nested_calls(way: str) -> None:
    def prepare(model: Net) -> None:
        for block in model.blocks:
            fully_shard(block.up)
        shard(model)

    compare(way, 2, prepare=prepare)


@pytest.mark.parametrize("kept", [True, False, 1, 2])
def test_when_wholes_are_freed(way: str, kept: bool | int) -> None:
    compare(way, 2, prepare=lambda m: shard(m, reshard_after_forward=kept))


@pytest.mark.parametrize("how", ["reentrant", "not"])
def test_activation_checkpointing(way: str, how: str) -> None:
    compare(way, 2, make=lambda: made(how=how))


def test_tied_parameters_of_the_root(way: str) -> None:
    compare(way, 2, make=lambda: made(tied=True))


@pytest.mark.parametrize("first", ["embed", "head"])
def test_tied_parameters_of_two_calls_go_to_the_one_around_them(way: str, first: str) -> None:
    def prepare(model: Net) -> None:
        fully_shard(getattr(model, first))
        fully_shard(model.head if first == "embed" else model.embed)
        shard(model)
        assert model.embed.weight is model.head.weight

    compare(way, 2, make=lambda: made(tied=True), prepare=prepare)


def test_frozen_parameters(way: str) -> None:
    def make() -> Net:
        model = made()
        for block in model.blocks:
            block.up.requires_grad_(False)
        model.embed.requires_grad_(False)
        return model

    compare(way, 2, make=make)


def test_several_forwards_before_a_backward(way: str) -> None:
    def step(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        first, second = (loss_of(model, mine(batch(number + k), size, rank)) for k in (0, 10))
        loss = first + 2 * second
        loss.backward()
        return loss

    compare(way, 2, step=step, expected_step=step)


@pytest.mark.parametrize("sync", [True, False])
def test_gradient_accumulation(way: str, sync: bool) -> None:
    def step(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        losses = []
        for k in range(3):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(sync or k == 2)
            loss = loss_of(model, mine(batch(number + 10 * k), size, rank)) / 3
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    compare(way, 2, step=step, expected_step=step)


def test_evaluation_between_steps(way: str) -> None:
    def step(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        with torch.no_grad():
            loss_of(model, mine(batch(number + 7), size, rank))
        assert all(isinstance(p, DTensor) for p in model.parameters()) or size == 1
        return by_step(model, number, size, rank)

    compare(way, 2, step=step)


def test_dimensions_chosen_by_the_user(way: str) -> None:
    def prepare(model: Net) -> None:
        shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        assert str(model.head.weight.placements) == "(Shard(dim=1),)"

    compare("gathered", 4, prepare=prepare)


def test_clipping(way: str) -> None:
    compare(way, 3, before_step=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))


@pytest.mark.parametrize("form", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_forms_of_optimizers(way: str, form: dict[str, Any]) -> None:
    compare(way, 2, optimizer=lambda p: torch.optim.AdamW(p, lr=0.05, **form))


def test_replicas_of_shards(way: str) -> None:
    def prepare(model: Net) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        shard(model, mesh=mesh)
        assert model.head.weight.placements == (Replicate(), Shard(0))

    compare(way, 4, prepare=prepare)


@pytest.mark.parametrize(
    ("dims", "cut"),
    [
        (DataParallelMeshDims(shard="b", replicate="a"), (Replicate(), Shard(0))),
        (DataParallelMeshDims(shard=("a", "b")), (Shard(0),)),
    ],
)
def test_data_axes_by_name(way: str, dims: DataParallelMeshDims, cut: Any) -> None:
    def prepare(model: Net) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        shard(model, mesh=mesh, dp_mesh_dims=dims, offload_policy=CPUOffloadPolicy())
        assert model.head.weight.placements == cut

    compare(way, 4, prepare=prepare)


@pytest.mark.parametrize("axes", [(2, 2), (1, 2), (2, 1)])
def test_over_tensor_parallel(way: str, axes: tuple[int, int]) -> None:
    def prepare(model: Net) -> None:
        mesh = init_device_mesh("cpu", axes, mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        shard(model, mesh=mesh["dp"])
        assert model.blocks[0].down.weight.placements == (Shard(0), Shard(1))
        if axes[1] > 1:
            cut = StridedShard(0, split_factor=axes[1])
            assert model.blocks[0].up.weight.placements == (cut, Shard(0))

    def wide() -> Net:
        model = made()
        with making:
            torch.manual_seed(2)
            for block in model.blocks:
                block.up, block.down = nn.Linear(6, 10).double(), nn.Linear(10, 6).double()
        return model

    compare(
        way,
        axes[0] * axes[1],
        prepare=prepare,
        make=wide,
        data_ranks=lambda rank: (axes[0], rank // axes[1]),
    )


def test_a_rank_that_skips_a_module_adds_zeros(way: str) -> None:
    """Rank 1 does not call block 1 from the second step on: its gradient there is zero."""

    class Skipping(Net):
        skip = False

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for number, block in enumerate(self.blocks):
                x = x if self.skip and number == 1 else block(x)
            return self.head(x)

    def make() -> Net:
        with making:
            torch.manual_seed(1)
            return Skipping().double()

    def step(model: Any, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        model.skip = rank == 1 and number > 0
        return by_step(model, number, size, rank)

    def expected(model: Any, number: int) -> torch.Tensor:
        losses = []
        for rank in range(2):
            model.skip = rank == 1 and number > 0
            loss = loss_of(model, mine(batch(number), 2, rank)) / 2
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    compare(way, 2, make=make, step=step, expected_step=expected)


def test_meta_modules_get_memory_and_values_of_the_shards(way: str) -> None:
    reference = made()

    def body(rank: int) -> dict[str, torch.Tensor | None]:
        with torch.device("meta"):
            model = Net().double()
        with strategy(way):
            shard(model)
        model.to_empty(device="cpu")
        values = {n: p.detach() for n, p in reference.named_parameters()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                full = DTensor.from_local(values[name], parameter.device_mesh, [Replicate()])
                parameter.copy_(full)
        by_step(model, 0, 2, rank)
        return {n: whole(p.grad) for n, p in model.named_parameters()}

    by_step(reference, 0)
    for grads in run_ranks(2, body):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad)


def test_parameters_that_backward_does_not_read_stay_sharded_there(way: str) -> None:
    def prepare(model: Net) -> None:
        fully_shard(model.embed)
        shard(model)
        model.embed.set_unshard_in_backward(False)

    compare(way, 2, prepare=prepare)


def test_a_hook_gets_reduced_gradients_once_a_group(way: str) -> None:
    """It doubles them: SGD with half the rate does the same."""

    def prepare(model: Net) -> None:
        shard(model)
        for module in (*model.blocks, model):
            module.set_all_reduce_hook(lambda flat: flat.mul_(2))

    def body(rank: int) -> list[torch.Tensor | None]:
        model = made()
        with strategy(way):
            prepare(model)
        by_step(model, 0, 2, rank)
        return [whole(p.grad) for p in model.parameters()]

    reference = made()
    by_step(reference, 0)
    for grads in run_ranks(2, body):
        for got, parameter in zip(grads, reference.parameters(), strict=True):
            if parameter.grad is not None:
                torch.testing.assert_close(got, 2 * parameter.grad)


def test_state_dictionaries_have_shards_under_the_users_names(way: str) -> None:
    def body(rank: int) -> None:
        model, other = made(), made()
        with strategy(way):
            shard(model)
            shard(other)
        by_step(model, 0, 2, rank)
        state = model.state_dict()
        assert list(state) == list(made().state_dict())
        assert all(isinstance(v, DTensor) for v in state.values())
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        other.load_state_dict(model.state_dict())
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())
        other.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
        by_step(other, 1, 2, rank)

    run_ranks(2, body)


def test_low_precision(way: str) -> None:
    """bfloat16 computes, float32 reduces: as one rank that rounds its weights, within its bits."""
    seen: list[Any] = []

    def body(rank: int) -> Any:
        model = made().float()
        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        with strategy(way):
            for block in model.blocks:
                fully_shard(block, mp_policy=low)
            fully_shard(model, mp_policy=dataclasses.replace(low, output_dtype=torch.float32))
        model.blocks[0].register_forward_pre_hook(lambda m, i: seen.append(m.up.weight.dtype))
        loss = by_step(model, 0, 2, rank)
        assert model.head.weight.dtype == torch.float32
        return loss.detach(), {n: whole(p.grad) for n, p in model.named_parameters()}

    reference = made().float()
    loss = by_step(reference, 0)
    results = run_ranks(2, body)
    assert set(seen) == {torch.bfloat16}
    torch.testing.assert_close(
        torch.stack([r[0] for r in results]).mean(), loss.detach(), rtol=0.02, atol=0.02
    )
    for name, parameter in reference.named_parameters():
        grad = results[0][1][name]
        if grad is not None:
            assert grad.dtype == torch.float32
            torch.testing.assert_close(grad, parameter.grad, rtol=0.1, atol=0.03)


def test_a_forward_that_raises_leaves_the_model_whole(way: str) -> None:
    def body(rank: int) -> None:
        model = made()
        with strategy(way):
            shard(model)
        with pytest.raises(IndexError):
            model(torch.tensor([99]))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        by_step(model, 0, 2, rank)

    run_ranks(2, body)


def test_another_method_gathers_as_forward_does(way: str) -> None:
    from dure.fsdp import register_fsdp_forward_method

    def body(rank: int) -> None:
        model = made()
        expected = model.head(model.embed(torch.arange(4))).detach()
        model.__class__.peek = lambda self, t: self.head(self.embed(t))  # pyright: ignore
        with strategy(way):
            shard(model)
        register_fsdp_forward_method(model, "peek")
        torch.testing.assert_close(model.peek(torch.arange(4)).detach(), expected)

    run_ranks(2, body)


def test_weights_that_were_kept_whole_are_those_of_the_last_step(way: str) -> None:
    """The root has its weights whole after a forward that no backward followed."""

    def step(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        loss_of(model, mine(batch(number + 7), size, rank))
        return by_step(model, number, size, rank)

    compare(way, 2, step=step, expected_step=step, prepare=fully_shard)

    def body(rank: int) -> None:
        model = made()
        with strategy(way):
            fully_shard(model, reshard_after_forward=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        by_step(model, 0, 2, rank)
        before = loss_of(model, batch(1)).detach()
        optimizer.step()
        after = loss_of(model, batch(1)).detach()
        assert before != after
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, batch(1)), after)

    run_ranks(2, body)


def test_only_the_rank_that_wrote_its_shard_need_know(way: str) -> None:
    """The root's weights are whole; one rank changes its rows: all gather anew."""

    def body(rank: int) -> None:
        model = nn.Linear(2, 4, bias=False)
        with strategy(way):
            fully_shard(model, reshard_after_forward=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        weight: Any = model.weight
        with torch.no_grad():
            model(torch.ones(1, 2))
        assert model(torch.ones(1, 2)).tolist() == [[2.0] * 4]
        model.reshard()
        if way == "shared":
            model(torch.ones(1, 2)).sum().backward()
        else:
            model(torch.ones(1, 2))
        if rank == 1:
            with torch.no_grad():
                weight.to_local().fill_(3.0)
        assert model(torch.ones(1, 2)).tolist() == [[2.0, 2.0, 6.0, 6.0]]

    run_ranks(2, body)


def test_modules_change_their_shards_while_they_are_whole(way: str) -> None:
    """`double()` after a forward that no backward followed."""

    def body(rank: int) -> None:
        model = made().float()
        with strategy(way):
            fully_shard(model)
        loss_of(model, batch(0))
        model.double()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert all(p.dtype == torch.float64 for p in model.parameters())
        by_step(model, 0, 2, rank)

    run_ranks(2, body)


def test_a_module_within_itself(way: str) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 4), 0.5))

        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return x @ self.weight if depth == 0 else self(x, depth - 1) @ self.weight

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nested = Nested()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.nested(x)

    reference = Around()
    reference(torch.ones(2, 4)).sum().backward()

    def body(rank: int) -> torch.Tensor:
        model = Around()
        with strategy(way):
            fully_shard(model.nested)
            fully_shard(model)
        model(torch.ones(2, 4)).sum().backward()
        return whole(model.nested.weight.grad)  # pyright: ignore

    for gradient in run_ranks(2, body):
        torch.testing.assert_close(gradient, reference.nested.weight.grad)


def test_two_forwards_with_a_backward_each(way: str) -> None:
    """The root is entered twice before the first backward."""

    def step(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        first, second = (loss_of(model, mine(batch(number + k), size, rank)) for k in (0, 10))
        second.backward()
        first.backward()
        return first + second

    compare(way, 2, step=step, expected_step=step)


def test_what_is_refused() -> None:
    def body(rank: int) -> None:
        model = made()
        with pytest.raises(ModuleError, match="no forward"):
            fully_shard(model.blocks)
        shard(model)
        with pytest.raises(ModuleError, match="data parallel already"):
            fully_shard(model)
        with pytest.raises(ModuleError, match="cannot be copied"):
            copy.deepcopy(model)
        odd = made()
        odd.head.weight = nn.Parameter(odd.head.weight.detach().t())
        with pytest.raises(ModuleError, match="contiguous"):
            fully_shard(odd)
        odd = made()
        odd.head.bias = nn.Parameter(torch.tensor(1.0))
        before = list(odd.parameters())
        with pytest.raises(ModuleError, match="without dimensions"):
            fully_shard(odd)
        assert all(a is b for a, b in zip(before, odd.parameters(), strict=True))
        with pytest.raises(UsageError, match="takes a module"):
            fully_shard([])
        mesh = init_device_mesh("cpu", (2, 1, 1))
        with pytest.raises(MeshError, match="no DeviceMesh"):
            fully_shard(made(), mesh="dp")  # pyright: ignore[reportArgumentType]
        with pytest.raises(MeshError, match="one axis, or of two"):
            fully_shard(made(), mesh=mesh)
        for number in (0, 3):
            with pytest.raises(MeshError, match="divides the shard axis"):
                fully_shard(made(), reshard_after_forward=number)

    run_ranks(2, body)
