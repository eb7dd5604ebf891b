"""Tensor parallelism: a small Llama under plans against one rank, and what they communicate."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
import math
from typing import Any

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
    assert_trained_alike,
    batches,
    llm,
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
        lambda: llm.MLP(llm.Shape(width=4, hidden=hidden)).double(),
        lambda: {"[gu]*": ColwiseParallel(), "down": RowwiseParallel()},
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


# --------------------------------------------------------------------------------------------------
# Tensor parallelism and the hooks of the program: they see what one process's hooks see.


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.arange(float(parameter.numel())) % 5 - 2
                parameter.copy_(values.view(parameter.shape))

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * factor


def values_of(tensor: Any) -> list[float]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.flatten().tolist()


Seen = list[tuple[Any, ...]]


def hook_parameters(model: nn.Module, names: tuple[str, ...]) -> Seen:
    """Double each gradient, record it when it is accumulated, and step with it."""
    seen: Seen = []
    for name in names:
        parameter = model.get_parameter(name)
        parameter.register_hook(lambda g: g * 2)
        removed = parameter.register_hook(lambda g: g * 1000)

        def record(p: torch.Tensor, name: str = name, removed: Any = removed) -> None:
            seen.append((name, values_of(p.grad)))
            torch.optim.SGD([p], lr=1.0).step()
            removed.remove()

        parameter.register_post_accumulate_grad_hook(record)
        removed.remove()
    return seen


def hook_modules(model: nn.Module) -> Seen:
    seen: Seen = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda _, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True
        )
        module.register_forward_hook(lambda _, args, kwargs, out: out + 1, with_kwargs=True)
        module.register_forward_hook(
            lambda *_, name=name: seen.append(("forward", name)), always_call=True
        )
        module.register_full_backward_pre_hook(lambda _, out: (out[0] * 3,))
        module.register_full_backward_hook(
            lambda _, into, out, name=name: seen.append(("backward", name))
        )
        module.register_full_backward_hook(lambda _, into, out: (into[0] * 2,))
    return seen


PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}
NAMES = ("up.weight", "up.bias", "down.weight", "down.bias")


def step(model: nn.Module) -> list[list[float]]:
    """Run a backward; return the gradients of the input and of parameters, and their values."""
    x = torch.tensor([[1.0, 2.0, -1.0, 0.0], [0.0, 1.0, 1.0, 3.0]]).requires_grad_()
    model(x, factor=2.0).sum().backward()
    parameters = [model.get_parameter(name) for name in NAMES]
    return [values_of(t) for p in parameters for t in (p, p.grad)] + [values_of(x.grad)]


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_hooks_run_as_in_one_process_whenever_they_were_registered_2_ranks(is_before: bool):
    def run(model: nn.Module, apply: Any) -> tuple[Seen, Seen, list[list[float]]]:
        if not is_before:
            model = apply(model)
        hooks = hook_parameters(model, NAMES), hook_modules(model)
        if is_before:
            model = apply(model)
        results = step(model)
        return sorted(hooks[0]), hooks[1], results

    def rank_main(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        plan = {name: style() for name, style in PLAN.items()}
        return run(copy.deepcopy(model), lambda m: parallelize_module(m, mesh, plan))

    model = Perceptron()
    expected = run(copy.deepcopy(model), lambda m: m)
    for found in run_ranks(2, rank_main):
        assert found == expected
