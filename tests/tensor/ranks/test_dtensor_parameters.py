"""DTensors as parameters of modules: what programs do with parameters, done with these."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from dure.errors import UsageError
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
from dure.testing import run_ranks
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_ranks

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


def test_a_compiled_module_trains_as_it_is() -> None:
    alone = alone_after(lambda alone: loss_of(alone, X).backward())
    counters.clear()

    def body(rank: int) -> None:
        model, x = distributed()
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(whole(compiled(x)), alone(X))
            model.zero_grad()
            loss_of(compiled, x).backward()
            check_gradients(model, alone)

    run_ranks(2, body)
    assert counters["stats"]["unique_graphs"] == 0  # nothing of DTensors was traced


# --------------------------------------------------------------------------------------------------
# What training programs do with parameters, done with DTensors and with whole tensors.


def ramp(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).reshape(shape) / 8


WHOLES = [ramp(4, 6).sin(), ramp(6, 3).cos(), ramp(3)]
X_IDIOMS = ramp(5, 4)
ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
Results = list[Any]
IDIOMS: dict[str, Callable[[list[Any], Any], Results]] = {}


def idiom(function: Callable[[list[Any], Any], Results]) -> Callable[[list[Any], Any], Results]:
    IDIOMS[function.__name__] = function
    return function


def loss(p: list[Any], x: Any) -> Any:
    return ((x @ p[0]).tanh() @ p[1] + p[2]).square().mean()


def taught(p: list[Any], x: Any) -> list[Any]:
    """Parameters with gradients."""
    loss(p, x).backward()
    return p


def steps(optimizer: Any, p: list[Any], x: Any, **zeroing: bool) -> list[Any]:
    for _ in range(3):
        optimizer.zero_grad(**zeroing)
        taught(p, x)
        optimizer.step()
    return p


def gradients(p: list[Any]) -> Results:
    return [one.grad for one in p]


@idiom
def scaled_losses_skip_what_is_not_finite(p, x):
    optimizer = torch.optim.AdamW(p, lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(loss(p, x) * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [*p, torch.tensor(scaler.get_scale())]


@idiom
def values_are_clipped_as_lists(p, x):
    nn.utils.clip_grad_value_(taught(p, x), 0.05, foreach=True)
    return gradients(p)


@idiom
def second_order_steps(p, x):
    optimizer = torch.optim.LBFGS(p, lr=0.1, max_iter=2)

    def closure():
        optimizer.zero_grad()
        value = loss(p, x)
        value.backward()
        return value

    optimizer.step(closure)
    return p


@idiom
def factored_states(p, x):
    return steps(torch.optim.Adafactor(p, lr=0.1), p, x)


@idiom
def recomputed_activations(p, x):
    for reentrant in (False, True):
        checkpoint(lambda y: loss(p, y), x.requires_grad_(), use_reentrant=reentrant).backward()
    return [*gradients(p), x.grad]


@idiom
def averages_over_time(p, x):
    model = nn.ParameterList(p)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    average.update_parameters(model)
    with torch.no_grad():
        for one in p:
            one.mul_(3)
    average.update_parameters(model)
    return list(average.module.parameters())


@idiom
def parameters_that_are_functions(p, x):
    layer = nn.Linear(4, 6, bias=False, dtype=torch.float64)
    called = torch.func.functional_call(layer, {"weight": p[0].detach().t()}, (x,))
    layer.weight = nn.Parameter(p[0].detach().t().contiguous())
    return [called, nn.utils.parametrizations.weight_norm(layer)(x)]


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ((2,), [[COLUMNS], [ROWS], [WHOLE], [WHOLE]]),
        ((2, 2), [[ROWS, COLUMNS], [COLUMNS, ROWS], [WHOLE, ROWS], [ROWS, WHOLE]]),
    ],
    ids=["tensor parallel", "over two axes"],
)
@pytest.mark.filterwarnings("ignore:aten.* has no sharding rule")
def test_idioms_of_training_programs(sizes: tuple[int, ...], places: list[Any]) -> None:
    expected = {
        name: function([nn.Parameter(t.clone()) for t in WHOLES], X_IDIOMS.clone())
        for name, function in IDIOMS.items()
    }

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", sizes)
        for name, function in IDIOMS.items():
            *own, x = (
                made(mesh, t.clone(), p) for t, p in zip([*WHOLES, X_IDIOMS], places, strict=True)
            )
            got = function([nn.Parameter(one) for one in own], x)
            for one, right in zip(got, expected[name], strict=True):
                seen = one.full_tensor() if isinstance(one, DTensor) else one
                torch.testing.assert_close(seen, right, msg=lambda m, n=name: f"{n}: {m}")

    run_ranks(math.prod(sizes), body)
