"""What ranks do in the tests of FSDP's streams: train on a simulated accelerator.

Each case trains as one rank does on the CPU, with work as late as it can be and in an order that a
seed draws; a wait that is missing changes the values.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

import dure as dist
from dure.fsdp import MixedPrecisionPolicy, strategy
from dure.testing import accelerator
from tests.parallel.fsdp.ranks import fsdp_models as models

SEEDS = (None, 1)
Step = Callable[[Any, int, int, int], torch.Tensor]


OF_4 = "of_4_"
"""How names of cases begin that need four ranks; others have two."""


def errors_of(
    run: Callable[..., dict[str, str]], names: list[str], *arguments: str
) -> dict[str, list[str]]:
    """Call `run` with names of cases on their ranks; return the ranks' errors by case.

    The ranks are not copies of this process, for the reason in `errors_on_two_ranks`.
    """
    found: dict[str, list[str]] = {name: [] for name in names}
    for size in (2, 4):
        of_size = [name for name in names if name.startswith(OF_4) == (size == 4)]
        if not of_size:
            continue
        for of_rank in dist.spawn(run, size, (of_size, *arguments), start="spawn"):
            for name, error in of_rank.items():
                found[name].append(error)
    return found


def run(names: list[str], backend: str) -> dict[str, str]:
    """Run the cases below over a backend; return this rank's errors."""
    return run_cases(globals(), names, backend)


def run_cases(
    cases: dict[str, Any],
    names: list[str],
    backend: str,
    argument: Callable[[str, int | None], Any] | None = None,
) -> dict[str, str]:
    """Run some of the cases of a module; return this rank's errors.

    A case gets its rank, and the number of ranks or what `argument` returns for its name and seed.
    """
    accelerator.install()
    dist.init_process_group(f"cpu:shm,sim:{backend}")
    errors: dict[str, str] = {}
    for name in names:
        try:
            for seed in SEEDS:
                accelerator.install(seed)
                second = argument(name, seed) if argument else dist.get_world_size()
                cases[f"case_{name}"](dist.get_rank(), second)
                torch.get_device_module("sim").synchronize()
            errors[name] = ""
        except BaseException:
            errors[name] = f"seed {seed}: {traceback.format_exc()}"
    dist.destroy_process_group()
    return errors


def by_step(model: Any, step: int, size: int, rank: int) -> torch.Tensor:
    """One step on this rank's rows, on the device. The host never waits."""
    data = models.mine(models.batch(step), size, rank)
    rows, targets = (t.to("sim", non_blocking=True) for t in data)
    loss = models.loss_of(model, (rows, targets))
    loss.backward()
    return loss


def made() -> Any:
    """Return a model all of whose parameters have gradients, so that no rank asks others for it."""
    model = models.made()
    del model.unused
    return model


def trains(
    rank: int,
    size: int,
    shard: Callable[[Any], Any] = models.shard,
    step: Step = by_step,
    tolerance: float = 1e-9,
) -> None:
    """Train on the device as on one rank's CPU: gradients and weights."""
    reference = made()
    models.trained(reference, models.by_step, models.adamw)
    with strategy("gathered"):
        model = shard(made().to("sim"))
    models.trained(model, lambda m, s: step(m, s, size, rank), models.adamw)
    expected = models.full_gradients(reference)
    compare(models.full_gradients(model), expected, tolerance=tolerance)
    compare(models.full_weights(model), models.full_weights(reference), tolerance=tolerance)


def case_a_step(rank: int, size: int) -> None:
    trains(rank, size)


def case_a_scaler_skips_the_step_if_one_shard_overflows(rank: int, size: int) -> None:
    """Rank r has row r of the weight; only rank 1's rows give an inf, in row 1 of the sum."""
    with strategy("gathered"):
        model = models.fully_shard(torch.nn.Linear(4, 2, bias=False).to("sim"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = dist.GradScaler("sim", init_scale=4.0, growth_interval=2)
    rows = torch.full((1, 4), rank + 1.0).to("sim")  # their mean, and so each gradient, is 1.5
    seen = []
    for overflows in (False, True, False, False):
        optimizer.zero_grad()
        out = model(rows)
        if overflows and rank == 1:
            out = torch.stack([out[:, 0], out[:, 1] * 3e38], 1)  # times the scale: inf
        scaler.scale(out.sum()).backward()
        if overflows:
            (shard,) = (p.grad.to_local() for p in model.parameters())
            assert shard.isfinite().all().item() == (rank == 0)
        scaler.step(optimizer)
        scaler.update()
        (weight,) = models.full_weights(model).values()
        seen.append((weight.tolist(), scaler.get_scale()))
    assert seen == [
        ([[-1.5] * 4] * 2, 4.0),
        ([[-1.5] * 4] * 2, 2.0),
        ([[-3.0] * 4] * 2, 2.0),
        ([[-4.5] * 4] * 2, 4.0),
    ]


def case_gradients_of_several_backwards_are_added(rank: int, size: int) -> None:
    def step(model: Any, number: int, size: int, rank: int) -> torch.Tensor:
        for k in range(2):
            model.set_requires_gradient_sync(k == 1)
            loss = by_step(model, number, size, rank)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2
        return loss

    trains(rank, size, step=step)


def case_gradients_of_several_reductions_are_added(rank: int, size: int) -> None:
    """In the shard's gradient, which the program reads and writes between them."""

    def step(model: Any, number: int, size: int, rank: int) -> torch.Tensor:
        for _ in range(2):
            loss = by_step(model, number, size, rank)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 2 / 3
        return loss

    reference, model = made(), sharded()
    models.by_step(reference, 0)
    expected = models.full_gradients(reference)
    step(model, 0, size, rank)
    factors = dict.fromkeys(expected, 2 / 3 + 4 / 9)
    compare(models.full_gradients(model), expected, factors)


def case_a_hook_of_the_program_reads_the_gradient(rank: int, size: int) -> None:
    """An optimizer for each parameter, in backward."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model, reference = sharded(mp_policy=policy), made()
    models.trained(reference, models.by_step, models.adamw)
    optimizers = {p: models.adamw([p]) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(models.STEPS):
        by_step(model, step, size, rank)
    compare(models.full_weights(model), models.full_weights(reference), tolerance=1e-4)


def case_unshard_sees_what_was_written(rank: int, size: int) -> None:
    model = sharded()
    by_step(model, 0, size, rank)
    for factor in (2.0, 4.0):
        with torch.no_grad():
            for parameter in model.blocks[0].parameters():
                parameter.mul_(2)
        model.blocks[0].unshard()
        found = {name: p.detach().clone() for name, p in model.blocks[0].named_parameters()}
        model.blocks[0].reshard()
        reference = {n: p.detach() for n, p in made().blocks[0].named_parameters()}
        compare(found, reference, dict.fromkeys(reference, factor))


def case_low_precision(rank: int, size: int) -> None:
    """Gradients are converted after the reduction."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    trains(rank, size, lambda model: models.shard(model, mp_policy=policy), tolerance=1e-3)


def case_of_4_parts_are_kept_until_backward(rank: int, size: int) -> None:
    trains(rank, size, lambda model: models.shard(model, reshard_after_forward=2))


def case_of_4_replicas(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard"))
    trains(rank, size, lambda model: models.shard(model, mesh=mesh))


def sharded(**options: Any) -> Any:
    return models.sharded("gathered", made().to("sim"), **options)


def compare(found: Any, expected: Any, factors: Any = None, tolerance: float = 1e-9) -> None:
    for name, values in expected.items():
        factor = 1.0 if factors is None else factors[name]
        on_host = None if found[name] is None else found[name].cpu()
        wanted = None if values is None else values * factor
        torch.testing.assert_close(on_host, wanted, rtol=tolerance, atol=tolerance)
