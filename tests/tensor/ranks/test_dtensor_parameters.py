"""DTensors as parameters of modules: what programs do with parameters, done with these."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

from dure.errors import UsageError
from dure.mesh import DeviceMesh
from dure.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from dure.tensor.placement_types import StridedShard
from tests.thread_ranks import on_mesh, on_ranks

X = torch.linspace(-1, 1, 24).reshape(6, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 5)  # uneven over two ranks
        self.down = nn.Linear(5, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


torch.manual_seed(0)
ALONE = Block()
CUTS: dict[str, Any] = {"up": Shard(0), "down": Shard(1)}


def partition(name: str, module: Any, mesh: Any) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        where = [CUTS[name]] if parameter.ndim == 2 or name == "up" else [Replicate()]
        module.register_parameter(key, distribute_tensor(parameter, mesh, where))


def distributed() -> tuple[Any, Any]:
    """Return the model over two ranks, and its input."""
    mesh = init_device_mesh("cpu", (2,))
    model = distribute_module(copy.deepcopy(ALONE), mesh, partition)
    return model, distribute_tensor(X, mesh, [Replicate()])


def loss_of(model: Any, x: Any) -> Any:
    return (model(x) ** 2).sum()


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_gradients(model: Any, alone: nn.Module) -> None:
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(own.grad), other.grad)


def alone_after(body: Callable[[nn.Module], None]) -> nn.Module:
    alone = copy.deepcopy(ALONE)
    body(alone)
    return alone


@pytest.mark.parametrize("placement", [Partial(), Shard(0)])
@on_mesh(2)
def test_a_gradient_that_was_moved_for_a_view_is_one_like_any(
    mesh: DeviceMesh, placement: Any
) -> None:
    """Autograd keeps such a result as the gradient where nobody else holds it, else a copy."""

    p = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    part = torch.ones(4) if placement == Partial() else torch.ones(2)
    grad: Any = DTensor.from_local(part, mesh, [placement])
    grad.copied_at = grad._version
    p.grad = grad
    torch._foreach_mul_([cast(Any, p.grad)], 3.0)
    assert p.grad.placements == (Shard(0),)
    assert p.grad.full_tensor().tolist() == [6.0 if placement == Partial() else 3.0] * 4


@on_ranks(2)
def test_state_goes_out_and_in(rank: int) -> None:
    model, x = distributed()
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    mesh = x.device_mesh
    torch.manual_seed(rank + 1)
    other = distribute_module(Block(), mesh, partition)
    other.load_state_dict(state)
    assert torch.equal(whole(other.up.weight), ALONE.up.weight)
    assert other.up.weight is not state["up.weight"]
    with torch.device("meta"):
        bare = Block()
    bare.load_state_dict(state, assign=True)
    assert isinstance(bare.up.weight, nn.Parameter)
    assert bare.up.weight.placements == (Shard(0),)  # pyright: ignore
    assert torch.equal(whole(bare(x)), whole(model(x)))
    with torch.device("meta"):
        bare = distribute_module(Block(), mesh, partition)
    assert bare.up.weight.is_meta
    bare.to_empty(device="cpu")
    assert isinstance(bare.up.weight, DTensor)
    assert not bare.up.weight.is_meta
    assert bare.up.weight.to_local().shape == (3 - rank, 4)
    bare.load_state_dict(state)
    assert torch.equal(whole(bare(x)), whole(model(x)))


@on_ranks(2)
def test_copies_are_copies(rank: int) -> None:
    model, x = distributed()
    loss_of(model, x).backward()
    twin = copy.deepcopy(model)
    check_gradients(twin, alone_after(lambda alone: loss_of(alone, X).backward()))
    with torch.no_grad():
        twin.up.weight.zero_()
    assert torch.equal(whole(model.up.weight), ALONE.up.weight)
    assert twin.up.weight.requires_grad
    shared = nn.ModuleList([model.up, model.up])
    first, second = copy.deepcopy(shared)
    assert first.weight is second.weight


PLACEMENTS = (Shard(1), Replicate(), Partial("max"), StridedShard(0, split_factor=2))


@pytest.mark.parametrize("weights_only", [False, True])
@on_ranks(2)
def test_saved_and_loaded(rank: int, weights_only: bool) -> None:
    model, x = distributed()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    torch.save(model.up.weight, parameter := io.BytesIO())
    file.seek(0)
    parameter.seek(0)
    state = torch.load(file, weights_only=weights_only)
    torch.save({"mesh": x.device_mesh, "placements": PLACEMENTS}, layout := io.BytesIO())
    layout.seek(0)
    assert torch.load(layout, weights_only=weights_only) == {
        "mesh": x.device_mesh,
        "placements": PLACEMENTS,
    }
    loaded = torch.load(parameter, weights_only=weights_only)
    assert isinstance(loaded, nn.Parameter)
    assert loaded.requires_grad
    assert state["down.weight"].device_mesh == x.device_mesh
    for key, value in ALONE.state_dict().items():
        assert state[key].placements == model.state_dict()[key].placements
        assert torch.equal(whole(state[key]), value)


@on_ranks(2)
def test_what_is_done_to_parameters(rank: int) -> None:
    model, x = distributed()
    weight = model.up.weight
    assert isinstance(weight.data, DTensor)
    assert not weight.data.requires_grad
    assert weight.detach().placements == weight.placements
    weight.data = weight.data * 2
    assert torch.equal(whole(weight), ALONE.up.weight * 2)
    with pytest.raises(UsageError):
        weight.data = ALONE.up.weight.data
    weight.data.mul_(0.5)
    assert torch.equal(whole(weight), ALONE.up.weight)
    weight.requires_grad_(False)
    assert not weight.requires_grad
    model.to(torch.float64)
    assert model.up.weight.dtype == torch.float64
    assert model.up.weight.to_local().dtype == torch.float64
    assert isinstance(model.up.weight, nn.Parameter)
    assert torch.equal(whole(model.up.weight), ALONE.up.weight.double())
    assert model(x.double()).dtype == torch.float64
    assert torch.equal(model.up.weight, model.up.weight.clone())
    assert not torch.equal(model.up.weight, model.up.weight * 2)
    changed = model.up.weight.clone()
    with torch.no_grad():
        changed.to_local()[:] += rank  # different on the second rank alone
    assert not torch.equal(model.up.weight, changed)


@on_ranks(2)
def test_hooks_of_tensors_and_modules(rank: int) -> None:
    model, x = distributed()
    x.requires_grad_()
    seen: list[str] = []
    weight = model.up.weight
    weight.register_hook(lambda grad: (seen.append(type(grad).__name__), grad * 2)[1])
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"post {p.grad.placements[0]}"))
    model.up.register_forward_hook(lambda m, i, o: seen.append(f"out {o.placements[0]}"))
    model.up.register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    loss_of(model, x).backward()
    assert sorted(seen) == sorted(["out S(1)", "backward", "DTensor", "post S(0)"])
    alone = alone_after(lambda alone: loss_of(alone, X).backward())
    torch.testing.assert_close(whole(weight.grad), alone.up.weight.grad * 2)  # pyright: ignore


@on_ranks(2)
def test_autocast(rank: int) -> None:
    model, x = distributed()
    alone = copy.deepcopy(ALONE)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = model(x), alone(X)
    assert out.dtype == torch.bfloat16
    (out.float() ** 2).sum().backward()
    (expected.float() ** 2).sum().backward()
    torch.testing.assert_close(whole(out).float(), expected.float(), rtol=0.05, atol=0.02)
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert own.grad.dtype == torch.float32
        torch.testing.assert_close(whole(own.grad), other.grad, rtol=0.1, atol=0.1)


@pytest.mark.filterwarnings("ignore:aten.stack")
@pytest.mark.parametrize(("norm_type", "foreach"), [(2.0, True), (1.0, None), (math.inf, False)])
@on_ranks(2)
def test_torchs_clipping_finds_the_norm_of_all(
    rank: int, norm_type: float, foreach: bool | None
) -> None:
    model, x = distributed()
    alone, extra = copy.deepcopy(ALONE), nn.Parameter(torch.ones(3))
    loss_of(model, x).backward()
    loss_of(alone, X).backward()
    extra.grad = torch.full((3,), 2.0)  # a plain one beside DTensors
    twin = copy.deepcopy(extra)
    twin.grad = extra.grad.clone()
    clip = torch.nn.utils.clip_grad_norm_
    seen: Any = clip([*model.parameters(), extra], 0.5, norm_type, foreach=foreach)
    expected = clip([*alone.parameters(), twin], 0.5, norm_type)
    torch.testing.assert_close(whole(seen), expected)
    check_gradients(model, alone)
    torch.testing.assert_close(extra.grad, twin.grad)
