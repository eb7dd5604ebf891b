"""What ranks do in the tests of shards in the host's memory: train on a simulated accelerator.

As in simulated_ranks.py, with work as late as it can be and in an order that a seed draws.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import dure as dist
from dure import checkpoint
from dure.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from dure.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from dure.tensor import distribute_tensor, init_device_mesh
from dure.testing import CommRecorder
from tests.parallel.fsdp.procs.simulated_ranks import (
    by_step,
    compare,
    made,
    run_cases,
    sharded,
    trains,
)
from tests.parallel.fsdp.ranks import fsdp_models as models

FOLDER = "DURE_TEST_FOLDER"


def run(names: list[str], backend: str, folder: str) -> dict[str, str]:
    """Run the cases below over a backend; return this rank's errors."""
    os.environ[FOLDER] = folder
    return run_cases(globals(), names, backend)


def _offloaded(**options: Any) -> Any:
    return sharded(offload_policy=CPUOffloadPolicy(), **options)


def case_a_step(rank: int, size: int) -> None:
    """Shards, gradients and optimizer state are on the host."""
    reference, model = made(), _offloaded()
    models.trained(reference, models.by_step, models.adamw)
    optimizers: list[torch.optim.Optimizer] = []

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        optimizers.append(models.adamw(parameters))
        return optimizers[0]

    models.trained(model, lambda m, s: by_step(m, s, size, rank), adamw)
    kept = [t for p in model.parameters() for t in (p, p.to_local(), p.grad, p.grad.to_local())]
    kept += [t for each in optimizers[0].state.values() for t in each.values()]
    assert {t.device.type for t in kept} == {"cpu"}
    expected = models.full_gradients(reference)
    compare(models.full_gradients(model), expected)
    compare(models.full_weights(model), models.full_weights(reference))


def case_gradients_are_added(rank: int, size: int) -> None:
    """To those that the program has changed since the backward before."""
    reference, model = made(), _offloaded()
    models.by_step(reference, 0)
    expected = models.full_gradients(reference)
    for _ in range(2):
        by_step(model, 0, size, rank)
        for parameter in model.parameters():
            parameter.grad *= 3
    compare(models.full_gradients(model), expected, dict.fromkeys(expected, 12.0))


def case_in_low_precision(rank: int, size: int) -> None:
    """Shards are converted on the way to the device, and gradients on the way back."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy()
    trains(
        rank,
        size,
        lambda model: models.shard(model, mp_policy=policy, offload_policy=offload),
        tolerance=1e-3,
    )


def case_hooks_get_gradients(rank: int, size: int) -> None:
    """An optimizer for each parameter, in backward, and a hook that waits for its end."""
    model, reference = _offloaded(), made()
    models.trained(reference, models.by_step, models.adamw)
    optimizers = {p: models.adamw([p]) for p in model.parameters()}
    doubled: list[torch.Tensor] = []

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    model.blocks[1].up.bias.register_hook(lambda grad: doubled.append(grad.full_tensor() * 2))
    for step in range(models.STEPS):
        by_step(model, step, size, rank)
    compare(models.full_weights(model), models.full_weights(reference))
    last = reference.blocks[1].up.bias.grad
    compare({"bias": doubled[-1]}, {"bias": last}, {"bias": 2.0})


def case_shards_are_written_after_a_forward(rank: int, size: int) -> None:
    """Without a backward, and between an unshard and the next."""
    reference, model = made(), _offloaded()
    rows = models.batch(0)[0]
    shards = [p.to_local().detach() for p in model.parameters()]
    kept = [shard.clone() for shard in shards]
    with torch.no_grad():
        expected = reference(rows)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            found = model(rows.to("sim", non_blocking=True))
        for shard in shards:
            shard.fill_(7)
        compare({"output": found.detach()}, {"output": expected})
        for shard, values in zip(shards, kept, strict=True):
            shard.copy_(values)
    model.reshard()
    block, bias = model.blocks[0], reference.blocks[0].up.bias.detach().clone()
    block.unshard()
    unsharded = block.up.bias.detach().clone()
    block.reshard()
    block.up.bias.to_local().detach().fill_(7)
    compare({"bias": unsharded}, {"bias": bias})


def case_gradients_are_clipped(rank: int, size: int) -> None:
    """By torch's function and by Dure's, to a tenth of their norm."""
    reference, model = made(), _offloaded()
    models.by_step(reference, 0)
    by_step(model, 0, size, rank)
    expected = models.full_gradients(reference)
    norm = torch.cat([g.flatten() for g in expected.values() if g is not None]).norm().item()
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), norm / 10)
    ours = dist.clip_grad_norm_(model.parameters(), norm / 100)
    assert (found.device.type, ours.device.type) == ("cpu", "cpu")
    norms = torch.stack([getattr(found, "full_tensor", lambda: found)(), ours])
    torch.testing.assert_close(norms, torch.tensor([norm, norm / 10]).double(), rtol=1e-4, atol=0)
    clipped = models.full_gradients(model)
    compare(clipped, expected, dict.fromkeys(expected, 0.01), tolerance=1e-4)


def case_models_are_made_without_memory(rank: int, size: int) -> None:
    """On the meta device, or the CPU; shards that are moved to the device are moved back."""
    reference = made()
    models.by_step(reference, 0)
    offload = CPUOffloadPolicy()
    mesh = dist.init_device_mesh("sim", (size,))
    with torch.device("meta"):
        empty: Any = models.Net()
    del empty.unused
    from_meta = models.shard(empty.double(), mesh=mesh, offload_policy=offload)
    from_meta.to_empty(device="cpu")
    state = {n: p.detach() for n, p in reference.named_parameters()}
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(from_meta, state, options=options)
    on_host = models.shard(made(), mesh=mesh, offload_policy=offload)
    made_by_load: list[Any] = []
    for given, sends in ((state, False), ({} if rank else state, True)):
        with torch.device("meta"):
            empty = models.Net()
        del empty.unused
        made_by_load.append(models.shard(empty.double(), mesh=mesh, offload_policy=offload))
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sends)
        set_model_state_dict(made_by_load[-1], given, options=how)
        assert {p.device.type for p in made_by_load[-1].parameters()} == {"cpu"}
    for model in (from_meta, on_host, *made_by_load):
        by_step(model, 0, size, rank)
        compare(models.full_gradients(model), models.full_gradients(reference))
    full = get_model_state_dict(from_meta, options=options)
    assert {t.device.type for t in full.values()} == {"cpu"}
    compare(full, state)
    on_host.to("sim")  # its shards, and their gradients, are moved back
    by_step(on_host, 1, size, rank)
    models.by_step(reference, 1)
    compare(models.full_gradients(on_host), models.full_gradients(reference))
    assert {p.device.type for p in on_host.parameters()} == {"cpu"}


def case_checkpoints(rank: int, size: int) -> None:
    """Of the model and of AdamW's state, loaded into another model, which trains on."""
    folder, models_and_optimizers = os.environ[FOLDER], []
    for _ in range(2):
        model = _offloaded()
        models_and_optimizers.append((model, models.adamw(model.parameters())))
    (model, optimizer), (other, its_optimizer) = models_and_optimizers
    by_step(model, 0, size, rank)
    optimizer.step()
    saved = {"state": get_state_dict(model, optimizer)}
    checkpoint.save(saved, checkpoint_id=f"{folder}/offloaded")
    loaded = {"state": get_state_dict(other, its_optimizer)}
    checkpoint.load(loaded, checkpoint_id=f"{folder}/offloaded")
    state, optimizer_state = loaded["state"]
    set_state_dict(other, its_optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    for each, its in models_and_optimizers:
        its.zero_grad()
        by_step(each, 1, size, rank)
        its.step()
    compare(models.full_gradients(other), models.full_gradients(model))
    compare(models.full_weights(other), models.full_weights(model))


def case_in_files(rank: int, size: int) -> None:
    offload = OffloadPolicy(path=os.environ[FOLDER])
    trains(rank, size, lambda model: models.shard(model, offload_policy=offload))


def case_of_4_replicas(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("sim", (2, 2), mesh_dim_names=("replicate", "shard"))
    offload = CPUOffloadPolicy()
    trains(rank, size, lambda model: models.shard(model, mesh=mesh, offload_policy=offload))


def case_calls_are_those_of_shards_on_the_device(rank: int, size: int) -> None:
    """The calls of a step are those of shards on the device, in their order."""
    calls: list[list[str]] = []
    for model in (sharded(), _offloaded()):
        by_step(model, 0, size, rank)
        with CommRecorder() as seen:
            by_step(model, 1, size, rank)
        calls.append([f"{event.op} {event.nbytes}" for event in seen.events])
    assert calls[0] == calls[1]
    assert len(calls[0]) > 8


def _small(device: str) -> Any:
    """Return a model whose weights are 1, 2, ... 12 and 1, 2."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.arange(1.0, parameter.numel() + 1)
            parameter.copy_(values.view(parameter.shape) / 8)
    return model.to(device)


def _weights(model: Any) -> dict[str, list[float]]:
    return {name: p.full_tensor().flatten().tolist() for name, p in model.named_parameters()}


def case_shards_on_the_device_are_assigned(rank: int, size: int) -> None:
    """To a model on the meta device; an optimizer that is made before the first step has them."""
    mesh = init_device_mesh("sim", (size,))
    model = fully_shard(_small("meta"), mesh=mesh, offload_policy=CPUOffloadPolicy())
    shards = model.state_dict()
    state = {
        name: distribute_tensor(value, mesh, shards[name].placements)
        for name, value in _small("sim").state_dict().items()
    }
    assert {value.device.type for value in state.values()} == {"sim"}
    model.load_state_dict(state, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert model(torch.zeros(1, 4, device="sim")).tolist() == [[1 / 8, 2 / 8]]
    model(torch.zeros(1, 4, device="sim")).sum().backward()
    optimizer.step()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert _weights(model)["1.bias"] == [1 / 8 - 1, 2 / 8 - 1]
    assert _weights(model)["0.weight"] == [n / 8 for n in range(1, 13)]


def case_a_model_is_moved_to_the_device_and_back(rank: int, size: int) -> None:
    """Its shards stay on the host, as in torch."""
    mesh = init_device_mesh("sim", (size,))
    model = fully_shard(_small("cpu"), mesh=mesh, offload_policy=CPUOffloadPolicy())
    model.to("sim")
    assert model(torch.zeros(1, 4, device="sim")).tolist() == [[1 / 8, 2 / 8]]
    model.reshard()
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def case_a_scaler_unscales_gradients_on_the_host(rank: int, size: int) -> None:
    """And finds the overflow of one rank, on all."""
    mesh = init_device_mesh("sim", (size,))
    model = fully_shard(_small("cpu"), mesh=mesh, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = dist.GradScaler("sim", init_scale=4.0)
    for overflows in (False, True):
        optimizer.zero_grad()
        loss = model(torch.zeros(1, 4, device="sim")).sum()
        scaler.scale(loss).backward()
        if overflows and rank == 1:
            next(iter(model.parameters())).grad.to_local().fill_(float("inf"))
        scaler.unscale_(optimizer)
        assert model[1].bias.grad.full_tensor().tolist() == [1.0, 1.0]
        scaler.step(optimizer)
        scaler.update()
        assert _weights(model)["1.bias"] == [1 / 8 - 1, 2 / 8 - 1]
        assert scaler.get_scale() == (2.0 if overflows else 4.0)
