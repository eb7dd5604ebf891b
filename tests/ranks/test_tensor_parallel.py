"""Tensor parallelism: a small Llama under plans against one rank, and plans that do not fit."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dure.errors import MeshError, PlacementError, ShapeError, UsageError
from dure.mesh import init_device_mesh
from dure.tensor import DTensor, Replicate, Shard, distribute_tensor
from dure.tensor.debug import CommDebugMode
from dure.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from dure.testing import run_ranks
from ranks.tensor_models import batches, loss_of, small_llama

STEPS = 4


def tp_plan():
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(),
        "output": ColwiseParallel(output_layouts=Replicate()),
    }


def sp_plan():
    gather = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    return {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.feed_forward": PrepareModuleInput(**gather),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def train(model, steps=STEPS):
    """Losses, gradients of the first step, and weights after some steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, grads = [], {}
    for number, ids in enumerate(batches(steps)):
        loss = loss_of(model, ids)
        loss.backward()
        if number == 0:
            grads = {n: whole(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss).item())
    return losses, grads, {n: whole(p) for n, p in model.named_parameters()}


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", [tp_plan, sp_plan])
def test_a_llama_trains_as_on_one_rank(n, tied, plan):
    losses, grads, weights = train(small_llama(tied=tied))

    def body(rank):
        mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
        model = parallelize_module(small_llama(tied=tied), mesh["tp"], plan())
        assert (model.output.weight is model.tok_embeddings.weight) == tied
        got_losses, got_grads, got_weights = train(model)
        assert got_losses == pytest.approx(losses, rel=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(got_grads[name], grad, msg=name)
        for name, weight in weights.items():
            torch.testing.assert_close(got_weights[name], weight, rtol=1e-8, atol=1e-8, msg=name)

    run_ranks(n, body)


def test_styles_bring_inputs_and_outputs_to_their_layouts():
    layer = nn.Linear(6, 4)  # not made by the ranks: threads share a generator

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        x = torch.arange(12.0).reshape(2, 6)
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


def test_paths_match_by_component_and_what_matches_nothing_is_told():
    def body(rank):
        mesh = init_device_mesh("cpu", (1,))
        model = small_llama()
        names = []

        class Notes(ParallelStyle):
            def _apply(self, module, device_mesh):
                names.append(module)
                return module

        parallelize_module(model, mesh, {"layers.?.attention.w*": Notes(), "": Notes()})
        assert len(names) == 2 * 4 + 1
        assert names[-1] is model
        for plan in (None, {}):
            with pytest.warns(UserWarning, match="no plan"):
                parallelize_module(model, mesh, plan)
        with pytest.warns(UserWarning, match=r"layers\.0\.attention\.wq"):
            parallelize_module(model, mesh, {"layers.*.attn.wq": Notes()})

    with warnings.catch_warnings():
        run_ranks(1, body)


def test_plans_that_do_not_fit_name_the_module():
    def body(rank):
        mesh = init_device_mesh("cpu", (3,))
        wrong = [
            ({"layers.*.attention.wq": ColwiseParallel()}, PlacementError, "layers.0.attention.wq"),
            ({"layers.*.attention.wk": ColwiseParallel()}, PlacementError, "n_kv_heads is 2"),
            ({"norm": ColwiseParallel()}, UsageError, "norm"),
            ({"output": "columns"}, UsageError, "output"),
            (3, UsageError, "a plan"),
        ]
        for plan, kind, text in wrong:
            with pytest.raises(kind, match=text):
                parallelize_module(small_llama(), mesh, plan)
        with pytest.raises(MeshError):
            parallelize_module(small_llama(), init_device_mesh("cpu", (1, 3)), ColwiseParallel())
        with pytest.raises(MeshError):
            parallelize_module(small_llama(), None, ColwiseParallel())
        tied = small_llama(tied=True)
        with pytest.raises(PlacementError, match="share"):
            parallelize_module(
                tied, mesh, {"tok_embeddings": ColwiseParallel(), "output": ColwiseParallel()}
            )
        for style in (
            lambda: PrepareModuleInput(input_layouts=Shard(0)),
            lambda: PrepareModuleInput(input_kwarg_layouts={"a": Shard(0)}),
            lambda: PrepareModuleOutput(
                output_layouts=(Shard(0), None), desired_output_layouts=Shard(0)
            ),
        ):
            with pytest.raises(PlacementError):
                style()
        with contextlib.nullcontext():
            layer = parallelize_module(
                nn.Identity(),
                mesh,
                PrepareModuleInput(
                    input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
                ),
            )
            with pytest.raises(PlacementError):
                layer(torch.ones(1))

    run_ranks(3, body)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_of_sharded_classes_is_that_of_the_whole(reduction, smoothing, weighted):
    """On a batch cut by one axis and classes by the other, evenly or not, some targets ignored."""
    classes = 5
    scores = torch.randn(7, classes, generator=torch.Generator().manual_seed(0)).double()
    target = torch.tensor([0, 4, -100, 2, 3, 1, 4])
    weight = torch.arange(1.0, classes + 1).double() if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": -100}
    wanted = scores.clone().requires_grad_()
    expected = F.cross_entropy(wanted, target, weight, **options)
    expected.sum().backward()

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 3))
        for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Shard(1)]):
            x = distribute_tensor(scores, mesh, placements).requires_grad_()
            t = target
            if placements[0] == Shard(0):
                t = distribute_tensor(target, mesh, [Shard(0), Replicate()])
            with CommDebugMode() as counted, loss_parallel():
                loss = F.cross_entropy(x, t, weight, **options)
                loss.sum().backward()
            torch.testing.assert_close(whole(loss), expected.detach())
            torch.testing.assert_close(x.grad.full_tensor(), wanted.grad)
            assert x.grad.placements == x.placements
            assert "all_gather" not in str(counted.get_comm_counts())

    run_ranks(6, body)


def test_a_whole_input_where_a_part_is_wanted_is_told():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        net = parallelize_module(nn.Linear(8, 4), mesh, RowwiseParallel())
        with pytest.raises(ShapeError, match="input_layouts=Replicate"):
            net(torch.ones(3, 8))
        assert net(torch.ones(3, 4)).shape == (3, 4)

    run_ranks(2, body)
