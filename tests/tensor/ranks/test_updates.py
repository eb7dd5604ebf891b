"""Torch's optimizers over DTensors: the steps of full tensors, on the parts, known to autograd."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dure.errors import PlacementError
from dure.tensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from dure.testing import run_ranks
from tests.tensor.ranks.parts import ORDERS, made
from tests.thread_ranks import on_mesh

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
FORMS = [
    (name, form)
    for name in (*FUSED, "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop")
    for form in ("loop", "foreach", "fused")
    if form != "fused" or name in FUSED
]


def optimizer_of(name: str, form: str, parameters: list[Any]) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"fused": True} if form == "fused" else {"foreach": form == "foreach"}
    if name == "SGD":
        options |= {"momentum": 0.9, "weight_decay": 0.1}
    return getattr(torch.optim, name)(parameters, lr=0.1, **options)


WEIGHT = torch.linspace(-1, 1, 24).reshape(6, 4)


def placed(full: torch.Tensor, mesh: Any, *placements: Placement) -> DTensor:
    return made(mesh, full, placements)


def grad_of(step: int) -> torch.Tensor:
    return torch.sin(torch.arange(24.0) + step).reshape(6, 4)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_an_optimizer_over_several_meshes_steps_as_over_full_tensors(name, form):
    expected = [nn.Parameter(WEIGHT * factor) for factor in (1, 2, 3, 4)]
    optimizer = optimizer_of(name, form, expected)
    for step in range(3):
        for one in expected:
            one.grad = grad_of(step)
        optimizer.step()

    def body(rank: int) -> None:
        line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
        ours: list[Any] = [
            nn.Parameter(placed(WEIGHT, line, Shard(0))),
            nn.Parameter(placed(WEIGHT * 2, grid, Shard(0), Shard(1))),
            nn.Parameter(WEIGHT * 3),
            nn.Parameter(placed(WEIGHT * 4, line, Replicate())),
        ]
        optimizer = optimizer_of(name, form, ours)
        for step in range(3):
            for own in ours:
                own.grad = grad_of(step)
                if isinstance(own, DTensor):  # Partial once, as of sharded inputs
                    partial = [Partial()] * own.device_mesh.ndim
                    where = partial if step == 1 else own.placements
                    own.grad = placed(grad_of(step), own.device_mesh, *where)
            optimizer.step()
        for own, other in zip(ours, expected, strict=True):
            seen = own.full_tensor() if isinstance(own, DTensor) else own
            torch.testing.assert_close(seen, other)

    run_ranks(4, body)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_fused_step_over_transposed_weights_is_that_of_full_tensors(name):
    """Rank 3 has an empty part, the others parts whose strides differ from the gradient's."""
    options: dict[str, Any] = {"lr": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    transposed = torch.linspace(-1, 1, 15).reshape(5, 3).t()
    grad = torch.cos(torch.arange(15.0)).reshape(3, 5)
    expected = nn.Parameter(transposed.clone())
    optimizer = getattr(torch.optim, name)([expected], **options)
    for _ in range(3):
        expected.grad = grad.clone()
        optimizer.step()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        weight: Any = nn.Parameter(placed(transposed.t(), mesh, Shard(0)).t())
        optimizer = getattr(torch.optim, name)([weight], fused=True, **options)
        for placement in (Replicate(), Shard(1), Replicate()):
            weight.grad = placed(grad, mesh, placement)
            optimizer.step()
        torch.testing.assert_close(weight.full_tensor(), expected.detach())
        for key, value in optimizer.state[weight].items():
            if key != "step":
                torch.testing.assert_close(value.full_tensor(), of_full[key])

    of_full = optimizer.state[expected]
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
@on_mesh(2)
def test_a_step_updates_the_parts_at_once(mesh, name, form):
    weights = [nn.Parameter(placed(WEIGHT * n, mesh, Shard(0))) for n in (1, 2, 3)]
    optimizer = optimizer_of(name, form, weights)
    for weight in weights:
        weight.grad = placed(torch.cos(WEIGHT), mesh, Shard(0))
    of_weights: list[bool] = []
    optimizer.register_step_post_hook(lambda o, *_: of_weights.append({*o.state} <= {*weights}))
    optimizer.step()
    with _Counting() as counting:
        optimizer.step()
    assert not counting.seen
    assert of_weights == [True, True]
    for weight in weights:
        for state in optimizer.state[weight].values():
            if isinstance(state, torch.Tensor) and state.ndim:
                assert isinstance(state, DTensor) and state.placements == (Shard(0),)
                assert state.shape == weight.shape


@on_mesh(2)
def test_a_step_that_raises_leaves_momentum_under_its_parameters(mesh):
    groups = [{"params": [nn.Parameter(placed(WEIGHT, mesh, Shard(0)))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    (first,), (other,) = (group["params"] for group in groups)
    first.grad = other.grad = placed(WEIGHT, mesh, Shard(0))
    optimizer.step()
    optimizer.param_groups[1]["momentum"] = "none"
    with pytest.raises(TypeError):
        optimizer.step()
    (buffer,) = optimizer.state_dict()["state"][0].values()
    torch.testing.assert_close(buffer.full_tensor(), WEIGHT * 1.9)
    optimizer.param_groups[1]["momentum"] = 0.9
    step: Any = type(optimizer).step
    step.__wrapped__(optimizer)  # without its hooks
    assert {*optimizer.state} == {first, other}


@pytest.mark.parametrize("form", ["loop", "foreach", "fused"])
@on_mesh(2)
def test_a_step_that_runs_no_hooks_updates_and_keeps_its_state(mesh, form):
    transposed = nn.Parameter(placed(WEIGHT.t().contiguous(), mesh, Shard(1)).t())
    plain = nn.Parameter(WEIGHT.clone())
    for weight in (transposed, plain):
        optimizer: Any = optimizer_of("SGD", form, [weight])
        for step in range(3):
            weight.grad = grad_of(step)
            if weight is transposed:
                weight.grad = placed(grad_of(step), mesh, Shard(0))
            optimizer.step() if step == 0 else type(optimizer).step.__wrapped__(optimizer)
        assert [*optimizer.state] == [weight]
    torch.testing.assert_close(transposed.full_tensor(), plain.detach())


@pytest.mark.parametrize("form", ["loop", "foreach", "fused"])
@on_mesh(2)
def test_a_step_between_forward_and_backward_is_noticed(mesh, form):
    weight = nn.Parameter(placed(WEIGHT, mesh, Shard(0)))
    flat = weight.detach().view(3, 8)  # rows of 4 made rows of 8: moved, a copy
    optimizer = optimizer_of("AdamW", form, [weight])
    weight.grad = placed(WEIGHT, mesh, Shard(0))
    loss = (weight * weight).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(PlacementError):
        _ = flat + 1
    moments = optimizer.state[weight]["exp_avg"]
    before = moments._version
    optimizer.step()
    assert moments._version > before


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize(
    ("number", "form"),
    [
        (n, f)
        for n in ("step", "lr")
        for f in ("loop", "foreach", "fused")
        if (n, f) != ("lr", "foreach")
    ],
)
def test_numbers_of_an_optimizer_may_be_replicated_on_any_mesh(name, number, form):
    options: dict[str, Any] = {"fused": True} if form == "fused" else {"foreach": form == "foreach"}

    def step(weight: Any, replicated: Any) -> Any:
        lr = torch.tensor(0.1)
        made = getattr(torch.optim, name)
        optimizer = made([weight], lr=replicated(lr) if number == "lr" else 0.1, **options)
        for _ in range(2):
            weight.grad = torch.cos(weight.detach())
            optimizer.step()
            state = optimizer.state[weight]
            state["step"] = replicated(state["step"]) if number == "step" else state["step"]
        return weight.detach(), float(optimizer.state[weight]["step"])

    expected = step(nn.Parameter(WEIGHT.clone()), lambda t: t)

    def body(rank: int) -> None:
        line, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
        # A step size is multiplied with the weights, and so on their mesh.
        for mesh in (line,) if number == "lr" else (line, grid):
            weight = nn.Parameter(placed(WEIGHT, line, Shard(0)))
            found = step(weight, lambda t, m=mesh: placed(t, m, *[Replicate()] * m.ndim))
            torch.testing.assert_close(found[0].full_tensor(), expected[0])
            assert found[1] == 2.0

    run_ranks(2, body)


# ---- parts in other orders -----------------------------------------------------------------------


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_reads_gradients_and_parameters_in_any_order(name):
    """Torch's fused kernels look at no strides; columns and gaps are those of a part."""
    orders = [ORDERS[name] for name in ("rows", "columns", "gaps")]
    pairs = list(itertools.product(orders, repeat=2))
    expected = [nn.Parameter(WEIGHT * factor) for factor in range(1, len(pairs) + 1)]
    theirs = optimizer_of(name, "loop", expected)
    for step in range(2):
        for one in expected:
            one.grad = grad_of(step)
        theirs.step()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        ours = [
            nn.Parameter(DTensor.from_local(weight(WEIGHT * n), mesh, [Shard(0)]))
            for n, (weight, _) in enumerate(pairs, 1)
        ]
        optimizer = optimizer_of(name, "fused", ours)
        for step in range(2):
            for own, (_, grad) in zip(ours, pairs, strict=True):
                part = grad(grad_of(step))
                own.grad = made(mesh, torch.cat([part, part]), [Shard(0)])
                own.grad.part = part
            optimizer.step()
        for own, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(own.to_local().detach(), other.detach())

    run_ranks(2, body)
