"""Tensor parallelism: a small Llama under plans against one rank, and what they communicate."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close as close

from dure.errors import ShapeError
from dure.mesh import init_device_mesh
from dure.tensor import DTensor, Replicate, Shard, distribute_tensor
from dure.tensor.debug import CommDebugMode
from dure.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from dure.testing import run_ranks
from tests.tensor.parallel.ranks.tensor_models import (
    BLOCKS,
    PLANS,
    FeedForward,
    assert_trained_alike,
    batches,
    loss_of,
    small_llama,
    train_on,
    trained_alone,
    whole,
)
from tests.thread_ranks import on_mesh

HEADS = {1: (4, 2), 2: (4, 2), 3: (6, 3), 8: (8, 8)}
"""For each number of ranks, heads and key-value heads that they divide."""
REDUCE, GATHER, SCATTER = (
    "c10d_functional.all_reduce",
    "c10d_functional.all_gather_into_tensor",
    "c10d_functional.reduce_scatter_tensor",
)
B = BLOCKS
COMMUNICATED = {
    # Forward: the embedding, and in each block the sums after attention and feed-forward; scores.
    # Backward: the input of each attention and feed-forward, and of the output layer.
    "tp": ({REDUCE: 1 + 2 * B, GATHER: 1}, {REDUCE: 2 * B + 1}, {}),
    # Forward: the same sums, scattered over the sequence; the inputs of attention, of feed-forward
    # and of the output layer, and scores, gathered. Backward: each by the other, but for scores,
    # whose gradient is replicated. After it: the gradient of each norm's weight.
    "sp": (
        {SCATTER: 1 + 2 * B, GATHER: 2 * B + 2},
        {GATHER: 1 + 2 * B, SCATTER: 2 * B + 1},
        {REDUCE: 2 * B + 1},
    ),
    # Scores stay where they are: of each token all ranks learn the highest and the sum of the
    # exponentials, and in backward the sum of the gradients. The loss is reduced at once.
    "loss": (
        {SCATTER: 1 + 2 * B, GATHER: 2 * B + 1, REDUCE: 3},
        {GATHER: 1 + 2 * B, SCATTER: 2 * B + 1, REDUCE: 1},
        {REDUCE: 2 * B + 1},
    ),
}
"""What a step communicates: forward and loss, backward, reading gradients."""


@pytest.mark.parametrize(
    ("shape", "tied"),
    [
        ((1, 1), False),
        ((1, 2), False),
        ((1, 2), True),
        ((1, 3), False),
        ((2, 2), False),
        pytest.param((1, 8), False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("plan", PLANS)
def test_a_llama_trains_as_on_one_rank(shape, tied, plan):
    heads = HEADS[shape[1]]
    expected = trained_alone(tied, *heads)

    def body(rank):
        assert_trained_alike(train_on(rank, shape, plan, tied, *heads), expected)

    run_ranks(math.prod(shape), body)


@pytest.mark.parametrize("plan", PLANS)
@on_mesh(2)
def test_a_step_communicates_what_the_plan_says_and_nothing_else(mesh, plan):
    model = parallelize_module(small_llama(), mesh, PLANS[plan]())
    forward, backward, reading = COMMUNICATED[plan]
    for ids in batches(2):  # the second takes the cached plans
        with CommDebugMode() as seen, loss_parallel():
            loss = loss_of(model, ids)
        assert seen.get_comm_counts() == forward
        with CommDebugMode() as seen, loss_parallel():
            loss.backward()
        assert seen.get_comm_counts() == backward
        for _ in range(2):
            with CommDebugMode() as seen:
                for parameter in model.parameters():
                    assert parameter.grad is not None
            assert seen.get_comm_counts() == reading
            reading = {}
        forward, backward, reading = COMMUNICATED[plan]
        model.zero_grad()


def test_styles_bring_inputs_and_outputs_to_their_layouts():
    layer = nn.Linear(6, 4).double()  # not made by the ranks: threads share a generator

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = torch.arange(12.0).double().reshape(2, 6)
        expected = layer(x).detach()
        both = [copy.deepcopy(layer) for _ in range(2)]
        column = parallelize_module(nn.Sequential(both[0]), mesh, {"0": ColwiseParallel()})
        assert torch.allclose(column(x), expected.chunk(2, 1)[rank])
        row = parallelize_module(both[1], mesh, RowwiseParallel(use_local_output=False))
        y = row(x.chunk(2, 1)[rank])
        assert y.placements == (Replicate(),)
        assert torch.allclose(y.full_tensor(), expected)
        seen = []

        class Sees(nn.Module):
            def forward(self, a, b, *, c):
                seen.extend([a, b, c])
                return a, b

        prepared = parallelize_module(
            Sees(),
            mesh,
            PrepareModuleInputOutput(
                input_layouts=(Shard(0), None),
                desired_input_layouts=(Replicate(), None),
                input_kwarg_layouts={"c": Replicate()},
                desired_input_kwarg_layouts={"c": Shard(0)},
                output_layouts=(Replicate(), None),
                desired_output_layouts=(Shard(1), None),
            ),
        )
        a, b = prepared(torch.ones(1, 2), "b", c=torch.ones(4))
        assert seen[0].shape == (2, 2)
        assert seen[0].placements == (Replicate(),)
        assert seen[2].to_local().shape == (2,)
        assert (a.shape, b) == ((2, 1), "b")

    run_ranks(2, body)


@on_mesh(2)
def test_a_full_input_in_place_of_a_part_is_refused(mesh):
    net = parallelize_module(nn.Linear(8, 4), mesh, RowwiseParallel())
    with pytest.raises(ShapeError, match="input_layouts=Replicate"):
        net(torch.ones(3, 8))
    assert net(torch.ones(3, 4)).shape == (3, 4)


def _against_whole(n, make, plan, x, loss=lambda y: y.square().sum()):
    """Compare a module under a plan with itself: output and gradients."""
    alone = make()
    expected = alone(x)
    loss(expected).backward()
    seen = []

    def body(rank):
        model = parallelize_module(copy.deepcopy(alone), init_device_mesh("cpu", (n,)), plan())
        model.zero_grad()
        with CommDebugMode() as counted:
            y = model(x)
            got = y.full_tensor(grad_placements=[Replicate()]) if isinstance(y, DTensor) else y
            close(got.detach(), expected.detach())
            loss(got).backward()
        for name, parameter in alone.named_parameters():
            close(whole(model.get_parameter(name).grad), parameter.grad, msg=name)
        if rank == 0:
            seen.append(counted.get_comm_counts())

    run_ranks(n, body)
    return seen[0]


@pytest.mark.parametrize(("n", "hidden"), [(2, 5), (3, 7), (4, 6), (4, 3)])
def test_hidden_features_need_not_divide(n, hidden):
    """The ranks' parts of 3 features on 4 ranks are 1, 1, 1 and 0."""
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()
    counts = _against_whole(
        n,
        lambda: FeedForward(4, hidden).double(),
        lambda: {"w[13]": ColwiseParallel(), "w2": RowwiseParallel()},
        x,
    )
    assert counts == {REDUCE: 1}


class Two(nn.Module):
    """Two layers of one input."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.q(x), self.k(x)


def test_a_part_that_is_written_between_layers_is_moved_again():
    layers = Two().double()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        style = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
        model = parallelize_module(copy.deepcopy(layers), mesh, {"[qk]": style})
        model.q.register_forward_hook(lambda *_: [given[0].to_local().zero_()].clear())
        given = []
        model.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]), prepend=True)
        for quiet in (torch.no_grad, torch.inference_mode):
            given.clear()
            with quiet():
                q, k = model(distribute_tensor(x, mesh, [Shard(0)]))
            close(q, layers.q(x).detach())
            close(k, layers.k(torch.zeros_like(x)).detach())

    run_ranks(2, body)
