"""Optimizers over DTensors of several meshes and plain tensors, beside the same unsharded."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dure.errors import PlacementError, UsageError
from dure.tensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from dure.tensor.rules.foreach import norm_of, norms_of
from dure.testing import run_ranks

WEIGHT = torch.linspace(-1, 1, 24).reshape(6, 4)
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
FORMS = [
    (name, form)
    for name in ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam",
                 "Adamax", "ASGD", "Rprop")
    for form in ("loop", "foreach", "fused")
    if form != "fused" or name in FUSED
]  # fmt: skip


def placed(whole: torch.Tensor, mesh: Any, *placements: Placement) -> DTensor:
    made = DTensor.from_local(whole.clone(), mesh, [Replicate()] * mesh.ndim)
    return made.redistribute(placements=placements)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_an_optimizer_over_several_meshes_steps_as_over_whole_tensors(name: str, form: str) -> None:
    options: dict[str, Any] = {"foreach": form == "foreach"}
    if form == "fused":
        options = {"fused": True}
    if name == "SGD":
        options |= {"momentum": 0.9, "weight_decay": 0.1}

    def body(rank: int) -> None:
        line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        wholes = [WEIGHT, WEIGHT * 2, WEIGHT * 3, WEIGHT * 4]
        ours: list[Any] = [
            nn.Parameter(placed(WEIGHT, line, Shard(0))),
            nn.Parameter(placed(WEIGHT * 2, grid, Shard(0), Shard(1))),
            nn.Parameter(WEIGHT * 3),
            nn.Parameter(placed(WEIGHT * 4, line, Replicate())),
        ]
        theirs = [nn.Parameter(whole.clone()) for whole in wholes]
        make = getattr(torch.optim, name)
        optimizers = make(ours, lr=0.1, **options), make(theirs, lr=0.1, **options)
        for step in range(3):
            grad = torch.sin(torch.arange(24.0) + step).reshape(6, 4)
            for own, other in zip(ours, theirs, strict=True):
                other.grad = own.grad = grad
                if not isinstance(own, DTensor):
                    continue
                mesh = own.device_mesh
                if step == 1:  # terms, as a replicated weight of sharded inputs gets them
                    terms = grad / mesh.size()
                    own.grad = DTensor.from_local(terms, mesh, [Partial()] * mesh.ndim)
                else:
                    own.grad = placed(grad, mesh, *own.placements)
            for optimizer in optimizers:
                optimizer.step()
        for own, other in zip(ours, theirs, strict=True):
            seen = own.full_tensor() if isinstance(own, DTensor) else own
            torch.testing.assert_close(seen, other)

    run_ranks(4, body)


def test_lists_that_lie_differently_go_tensor_by_tensor() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        first = placed(WEIGHT, mesh, Shard(0))
        second = placed(WEIGHT, mesh, Shard(1))
        torch._foreach_add_([first], [second], alpha=2)
        assert first.placements == (Shard(0),)
        assert torch.equal(first.full_tensor(), WEIGHT * 3)
        terms = DTensor.from_local(WEIGHT.clone(), mesh, [Partial()])
        (root,) = torch._foreach_abs([terms])
        assert torch.equal(root.full_tensor(), (WEIGHT * 4).abs())
        torch._foreach_mul_([terms], 0.5)
        assert torch.equal(terms.full_tensor(), WEIGHT * 2)
        row = placed(torch.arange(4.0), mesh, Shard(0))
        (made,) = torch._foreach_mul([placed(WEIGHT, mesh, Shard(1))], [row])
        assert torch.equal(made.full_tensor(), WEIGHT * torch.arange(4.0))
        with pytest.raises(PlacementError, match="would have to move what it writes"):
            torch._foreach_add_([terms], 1.0)
        with pytest.raises(UsageError, match="plain tensor beside DTensors"):
            torch._foreach_add_([first], [WEIGHT])
        with pytest.raises(PlacementError, match="lie differently"):
            torch._fused_sgd_(
                [first], [second], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
                nesterov=False, maximize=False, is_first_step=False,
            )  # fmt: skip

    run_ranks(4, body)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 0.0, math.inf, -math.inf])
def test_norms_of_dtensors_and_plain_ones(p: float) -> None:
    def body(rank: int) -> None:
        line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        wholes = [WEIGHT, WEIGHT * 2, WEIGHT * 3, WEIGHT * 4, WEIGHT * 5, torch.ones(2)]
        tensors = [
            placed(WEIGHT, line, Shard(0)),
            placed(WEIGHT * 2, grid, Replicate(), Shard(1)),
            WEIGHT * 3,
            placed(WEIGHT * 4, line, Replicate()),
            DTensor.from_local(WEIGHT * 5 / 4, grid, [Partial(), Partial()]),
            placed(torch.ones(2), line, Shard(0)),  # two ranks have nothing
        ]
        for norm, whole in zip(norms_of(tensors, p), wholes, strict=True):
            seen = norm.full_tensor() if isinstance(norm, DTensor) else norm
            torch.testing.assert_close(seen, torch.linalg.vector_norm(whole, p))
        flat = torch.cat([whole.flatten() for whole in wholes])
        torch.testing.assert_close(norm_of(tensors, p).float(), torch.linalg.vector_norm(flat, p))
        norms = torch._foreach_norm([tensors[0], tensors[3]], p)
        torch.testing.assert_close(norms[0].full_tensor(), torch.linalg.vector_norm(WEIGHT, p))

    run_ranks(4, body)


def test_what_one_rank_finds_not_finite_all_ranks_have_found() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        bad = torch.ones(8)
        bad[7] = math.inf  # on the last rank
        for whole, expected in ((torch.ones(8), 0.0), (bad, 1.0)):
            grads = [placed(whole, mesh, Shard(0)), torch.ones(3)]
            found = torch.zeros(1)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.full((1,), 0.5))
            assert found.item() == expected
            assert torch.equal(grads[0].full_tensor(), whole * 0.5)
            assert torch.equal(grads[1], torch.full((3,), 0.5))

    run_ranks(4, body)


def test_a_scaler_skips_the_step_on_all_ranks() -> None:
    def body(rank: int) -> float:
        mesh = init_device_mesh("cpu", (4,))
        weight = nn.Parameter(placed(torch.ones(4), mesh, Shard(0)))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for last in (1.0, math.inf, 1.0):
            factor = torch.ones(4)
            factor[3] = last  # on the last rank
            optimizer.zero_grad()
            loss = (weight * placed(factor, mesh, Shard(0))).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert torch.equal(weight.full_tensor(), torch.zeros(4))  # pyright: ignore
        return scaler.get_scale()

    assert run_ranks(4, body) == [2.0] * 4


def test_an_optimizers_state_goes_out_and_in() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))

        def made() -> tuple[Any, torch.optim.Optimizer]:
            weight = nn.Parameter(placed(WEIGHT, mesh, Shard(0)))
            return weight, torch.optim.Adam([weight], lr=0.1)

        weight, optimizer = made()
        weight.grad = placed(WEIGHT, mesh, Shard(0))
        optimizer.step()
        torch.save(optimizer.state_dict(), file := io.BytesIO())
        file.seek(0)
        other, again = made()
        again.load_state_dict(torch.load(file, weights_only=False))
        state = again.state[other]["exp_avg"]
        assert state.placements == (Shard(0),)
        torch.testing.assert_close(state.full_tensor(), WEIGHT * 0.1)

    run_ranks(4, body)


def test_averages_of_models_follow_them() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        layer: Any = nn.Linear(4, 6, bias=False)
        layer.weight = nn.Parameter(placed(WEIGHT, mesh, Shard(0)))
        average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        average.update_parameters(layer)
        with torch.no_grad():
            layer.weight.zero_()
        average.update_parameters(layer)
        seen: Any = average.module.weight
        assert seen.placements == (Shard(0),)
        torch.testing.assert_close(seen.full_tensor(), WEIGHT * 0.75)

    run_ranks(4, body)


# ---- updates on the parts ------------------------------------------------------------------------


class _Counting(TorchDispatchMode):
    """Counts operators that are given DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(t, DTensor) for t in pytree.tree_leaves((args, kwargs))):
            self.seen.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_step_updates_the_parts_at_once(name: str, form: str) -> None:
    options: dict[str, Any] = {"fused": True} if form == "fused" else {"foreach": form == "foreach"}
    if name == "SGD":
        options["momentum"] = 0.9

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        weights = [nn.Parameter(placed(WEIGHT * n, mesh, Shard(0))) for n in (1, 2, 3)]
        optimizer = getattr(torch.optim, name)(weights, lr=0.1, **options)
        for weight in weights:
            weight.grad = placed(torch.cos(WEIGHT), mesh, Shard(0))
        optimizer.step()
        with _Counting() as counting:
            optimizer.step()
        assert not counting.seen
        for weight in weights:
            for state in optimizer.state[weight].values():
                if isinstance(state, torch.Tensor) and state.ndim:
                    assert isinstance(state, DTensor) and state.placements == (Shard(0),)
                    assert state.shape == weight.shape

    run_ranks(2, body)


@pytest.mark.parametrize("form", ["loop", "foreach", "fused"])
def test_a_step_between_forward_and_backward_is_noticed(form: str) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        options = {"fused": True} if form == "fused" else {"foreach": form == "foreach"}
        weight = nn.Parameter(placed(WEIGHT, mesh, Shard(0)))
        flat = weight.detach().view(3, 8)  # rows of 4 made rows of 8: moved, a copy
        optimizer = torch.optim.AdamW([weight], lr=0.1, **options)  # pyright: ignore
        weight.grad = placed(WEIGHT, mesh, Shard(0))
        loss = (weight * weight).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with pytest.raises(PlacementError, match="view that is a copy"):
            _ = flat + 1
        moments = optimizer.state[weight]["exp_avg"]
        before = moments._version
        optimizer.step()
        assert moments._version > before

    run_ranks(2, body)


def test_what_does_not_lie_alike_goes_operator_by_operator() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        ours = [nn.Parameter(placed(WEIGHT, mesh, Shard(0))) for _ in range(2)]
        theirs = nn.Parameter(WEIGHT.clone())
        ours[0].grad = placed(torch.cos(WEIGHT), mesh, Shard(1))
        ours[1].grad = placed(torch.cos(WEIGHT), mesh, Shard(0))
        theirs.grad = torch.cos(WEIGHT)
        for parameters in (ours, [theirs]):
            torch.optim.AdamW(parameters, lr=0.1, foreach=True).step()
        for one in ours:
            assert one.placements == (Shard(0),)
            torch.testing.assert_close(one.full_tensor(), theirs)

    run_ranks(2, body)
