"""What training programs do with parameters, done with DTensors and with whole tensors."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from dure.tensor import DTensor, Replicate, Shard, init_device_mesh
from dure.testing import run_ranks
from tests.tensor.ranks.dtensor_worlds import ramp
from tests.tensor.ranks.parts import made

WHOLES = [ramp(4, 6).sin(), ramp(6, 3).cos(), ramp(3)]
X = ramp(5, 4)
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
def gradients_of_gradients(p, x):
    found = torch.autograd.grad(loss(p, x), p, create_graph=True)
    sum((g * g).sum() for g in found).backward()
    return gradients(p)


@idiom
def values_are_clipped_as_lists(p, x):
    nn.utils.clip_grad_value_(taught(p, x), 0.05, foreach=True)
    return gradients(p)


@idiom
def the_norm_is_found_and_then_used(p, x):
    norm = nn.utils.get_total_norm(gradients(taught(p, x)))
    nn.utils.clip_grads_with_norm_(p, 0.05, norm)
    return [norm, *gradients(p)]


@idiom
def steps_within_backward(p, x):
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in p}

    def step(one):
        optimizers[one].step()
        optimizers[one].zero_grad()

    for one in p:
        one.register_post_accumulate_grad_hook(step)
    return taught(p, x)


@idiom
def momentum_and_a_schedule(p, x):
    optimizer = torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return steps(optimizer, p, x, set_to_none=False)


@idiom
def groups_of_parameters(p, x):
    groups = [{"params": p[:1], "lr": 0.1}, {"params": p[1:], "weight_decay": 0.0}]
    return steps(torch.optim.AdamW(groups, lr=0.01, amsgrad=True), p, x)


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
def a_run_that_is_saved_and_goes_on(p, x):
    steps(optimizer := torch.optim.Adam(p, lr=0.1), p, x)
    torch.save((optimizer.state_dict(), [one.detach() for one in p]), file := io.BytesIO())
    file.seek(0)
    state, values = torch.load(file, weights_only=False)
    again = [nn.Parameter(value) for value in values]
    resumed = torch.optim.Adam(again, lr=0.1)
    resumed.load_state_dict(state)
    return steps(resumed, again, x)


@idiom
def steps_by_hand(p, x):
    taught(p, x)
    with torch.no_grad():
        for one in p:
            one.sub_(0.1 * one.grad)
            one.add_(one.grad, alpha=-0.1).mul_(0.9)
            one.grad.zero_()
    return [*p, *gradients(p)]


@idiom
def data_that_is_edited(p, x):
    for one in p:
        one.data.mul_(2)
        one.data = one.data + 1
        one.data.clamp_(min=0, max=3)
    return p


@idiom
def other_dtypes(p, x):
    return [one for q in p for one in (q.to(torch.bfloat16).double(), q.float(), q.half().sum())]


@idiom
def accumulated_over_batches(p, x):
    for number in range(3):
        (loss(p, x * (number + 1)) / 3).backward()
    return gradients(p)


@idiom
def recomputed_activations(p, x):
    for reentrant in (False, True):
        checkpoint(lambda y: loss(p, y), x.requires_grad_(), use_reentrant=reentrant).backward()
    return [*gradients(p), x.grad]


@idiom
def a_graph_that_is_kept(p, x):
    value = loss(p, x)
    value.backward(retain_graph=True)
    value.backward()
    hidden = x @ p[0]
    hidden.retain_grad()
    hidden.square().sum().backward()
    return [*gradients(p), hidden.grad]


@idiom
def checks_that_programs_make(p, x):
    finite = all(bool(grad.isfinite().all()) for grad in gradients(taught(p, x)))
    numbers = [float(one.detach().abs().max()) for one in p] + [
        sum(one.numel() for one in p),
        finite,
    ]
    return [torch.tensor(numbers), p[0].grad.norm(), p[1].grad.norm(p=1)]


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
def evaluation(p, x):
    with torch.no_grad():
        first = loss(p, x)
    with torch.inference_mode():
        second = loss(p, x)
    return [first, second]


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
        name: function([nn.Parameter(t.clone()) for t in WHOLES], X.clone())
        for name, function in IDIOMS.items()
    }

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", sizes)
        for name, function in IDIOMS.items():
            *own, x = (made(mesh, t.clone(), p) for t, p in zip([*WHOLES, X], places, strict=True))
            got = function([nn.Parameter(one) for one in own], x)
            for one, right in zip(got, expected[name], strict=True):
                seen = one.full_tensor() if isinstance(one, DTensor) else one
                torch.testing.assert_close(seen, right, msg=lambda m, n=name: f"{n}: {m}")

    run_ranks(math.prod(sizes), body)
