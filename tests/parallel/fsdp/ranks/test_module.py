"""The methods of a sharded module: the effect of each on results or on communication."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from dure.device_mesh import init_device_mesh
from dure.errors import UsageError
from dure.fsdp import FSDPModule, share_comm_ctx
from dure.tensor import DTensor
from dure.testing import CommRecorder, run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import (
    Net,
    assert_same,
    batch,
    by_parts,
    by_step,
    compare,
    expected_gradients,
    full_gradients,
    loss_of,
    made,
    mine,
    shard,
    sharded,
)
from tests.thread_ranks import on_ranks


def gathers(seen: CommRecorder) -> int:
    return Counter(seen.ops)["all_gather_single"]


def microbatches(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
    """Three backwards; gradients are reduced, and parameters resharded, after the last."""
    losses = []
    for k in range(3):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(k == 2)
            model.set_is_last_backward(k == 2)
            model.set_reshard_after_backward(k == 2)
        loss = loss_of(model, mine(batch(number + 10 * k), size, rank))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def test_parameters_stay_unsharded_between_microbatches(way):
    compare(way, 2, step=microbatches, expected_step=microbatches)


@on_ranks(2)
def test_unsharded_parameters_are_not_gathered_again(rank):
    """Four groups for the first forward; three blocks, freed after it, for each backward."""

    with CommRecorder() as seen:
        microbatches(sharded("gathered"), 0, 2, rank)
    assert {*seen.ops} == {"all_gather_single", "reduce_scatter_single"}
    model = sharded("gathered")
    with CommRecorder() as freed:
        by_step(model, 0, 2, rank)
    model.set_reshard_after_forward(False)
    with CommRecorder() as kept:
        by_step(model, 0, 2, rank)
    with pytest.raises(UsageError):
        model.set_reshard_after_forward(2)
    assert (gathers(seen), gathers(freed), gathers(kept)) == (4 + 3 * 3, 4 + 3, 4)


def test_replicas_are_reduced_at_the_last_microbatch(way):
    def step(model: nn.Module, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        losses = []
        for k in range(2):
            if isinstance(model, FSDPModule):
                model.set_requires_all_reduce(k == 1)
            loss = loss_of(model, mine(batch(number + 10 * k), size, rank))
            loss.backward()
            if isinstance(model, FSDPModule) and k == 0:
                assert all(p.grad is None for p in model.parameters())
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def prepare(model: Net) -> None:
        shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))

    compare(way, 4, prepare=prepare, step=step, expected_step=step)


@pytest.mark.parametrize("async_op", [True, False])
@on_ranks(2)
def test_parameters_are_unsharded_by_hand(rank, way, async_op):
    model = sharded(way)
    block = model.blocks[1]
    expected: Any = made().blocks[1].up.weight  # pyright: ignore
    handle = block.unshard(async_op=async_op)
    assert (handle is not None) == async_op
    if handle is not None:
        assert isinstance(block.up.weight, DTensor)
        handle.wait()
        handle.wait()
    assert not isinstance(block.up.weight, DTensor)
    assert torch.equal(block.up.weight, expected)
    assert isinstance(model.head.weight, DTensor)
    block.reshard()
    assert isinstance(block.up.weight, DTensor)
    by_step(model, 0, 2, rank)


def test_a_module_may_be_unsharded_between_forward_and_backward(way):
    def step(model: Any, number: int, size: int = 1, rank: int = 0) -> torch.Tensor:
        loss = loss_of(model, mine(batch(number), size, rank))
        if isinstance(model, FSDPModule):
            model.blocks[1].unshard()  # pyright: ignore
        loss.backward()
        if isinstance(model, FSDPModule):
            model.blocks[1].reshard()  # pyright: ignore
        return loss.detach()

    compare(way, 2, step=step)


@pytest.mark.parametrize("force", [True, False])
def test_sums_are_divided_by_the_factor_of_the_program(way, force):
    """By 4 in place of 2 ranks, in one module."""

    def body(rank: int) -> Any:
        model = sharded(way)
        model.blocks[0].set_gradient_divide_factor(4.0)
        model.set_force_sum_reduction_for_comms(force)
        by_step(model, 0, 2, rank)
        return full_gradients(model)

    expected = expected_gradients()
    for name, gradient in expected.items():
        if name.startswith("blocks.0.") and gradient is not None:
            gradient.mul_(0.5)
    for found in run_ranks(2, body):
        assert_same(found, expected)


HOOKED = [
    # dtype, ranks, the program's factor, force_sum, what the hook gets: gradients are 12 per rank
    (torch.float32, 4, 8.0, False, 6.0),
    (torch.float32, 4, None, True, 48.0),
    (torch.float64, 4, 8.0, False, 12.0),  # divided by 4, and by 2
    (torch.float64, 3, None, False, 18.0),  # divided by 2, and by 1.5
]


@pytest.mark.parametrize(("dtype", "ranks", "factor", "force", "expected"), HOOKED)
def test_a_hook_gets_gradients_divided_as_in_torch(way, dtype, ranks, factor, force, expected):
    """What is left to divide is divided after the hook, which has added 6."""
    total, divisor = 12.0 * ranks, factor or ranks
    rest = total / divisor / expected

    def body(rank: int) -> None:
        model: Any = nn.Linear(1, ranks, bias=False, dtype=dtype)
        seen: list[set[float]] = []

        def hook(flat: torch.Tensor) -> None:
            seen.append({*flat.tolist()})
            flat.add_(6.0)

        by_parts(way, model)
        model.set_all_reduce_hook(hook)
        model.set_force_sum_reduction_for_comms(force)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model(torch.full((1, 1), 12.0, dtype=dtype)).sum().backward()
        assert seen == [{expected}]
        torch.testing.assert_close(
            model.weight.grad.to_local().flatten(),
            torch.tensor([(expected + 6.0) * rest], dtype=dtype),
        )

    run_ranks(ranks, body)


@on_ranks(2)
def test_modules_are_gathered_ahead_as_the_program_says(rank):
    """In forward block 0 asks for both others; in backward block 2 does."""

    model = sharded("gathered")
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second, first])
    forward: list[int] = []
    backward: list[int] = []
    with CommRecorder() as seen:
        handles = [
            first.register_forward_hook(lambda *_: forward.append(gathers(seen))),
            third.down.register_full_backward_hook(lambda *_: backward.append(gathers(seen))),
        ]
        by_step(model, 0, 2, rank)
        for handle in handles:
            handle.remove()
    with pytest.raises(UsageError):
        first.set_modules_to_forward_prefetch([model.head])
    by_step(model, 1, 2, rank)
    assert (forward, backward) == ([4], [7])
    # The root and all blocks when block 0 ends; all blocks once more in block 2's backward.


@on_ranks(2)
def test_ignored_parameters_stay_as_they_are(rank, way):
    model, alone = made(), made()
    kept = model.head.weight
    sharded(way, model, ignored_params={kept})
    by_step(model, 0, 2, rank)
    assert model.head.weight is kept
    assert not isinstance(kept, DTensor)
    by_step(alone, 0, 2, rank)
    torch.testing.assert_close(kept.grad, alone.head.weight.grad)
    assert isinstance(model.embed.weight, DTensor)


@on_ranks(2)
def test_methods_that_change_nothing_are_accepted(rank, way):
    models = [sharded(way) for _ in range(2)]
    share_comm_ctx(models)
    for model in models:
        by_step(model, 0, 2, rank)
    plain: Any = nn.Linear(2, 2)
    with pytest.raises(UsageError):
        share_comm_ctx([plain])
    FSDPModule.set_post_optim_event(models[0], None)
    models[0].set_allocate_memory_from_process_group_for_comm(True)
    models[0].set_symm_mem_for_comm()
    models[0].set_separate_reduce_scatter_group()
    models[0].set_reduce_scatter_unused_params(True)
    models[0].set_reduce_scatter_max_input_buffers(1)
    with pytest.raises(UsageError):
        models[0].set_reduce_scatter_max_input_buffers(0)
    for wrong in (2.5, True):
        with pytest.raises(TypeError):
            models[0].set_reduce_scatter_max_input_buffers(wrong)  # pyright: ignore
    by_step(models[0], 1, 2, rank)
