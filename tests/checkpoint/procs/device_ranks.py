"""What ranks do in the tests of checkpoints of device tensors, on a simulated accelerator.

Values are written to the device as late as they can be, so a save or a load that does not wait for
the stream has others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dure as dist
from dure.checkpoint import (
    Checkpointer,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    async_save,
    load,
    restoring,
    save,
)
from dure.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from dure.tensor import Shard, distribute_tensor
from tests.checkpoint.saved_states import counted
from tests.parallel.fsdp.procs.simulated_ranks import run_cases
from tests.waiting import PATIENCE_S


def run(names: list[str], backend: str, folder: str) -> dict[str, str]:
    """Run the cases below over a backend; return this rank's errors."""
    return run_cases(globals(), names, backend, lambda name, seed: Path(folder) / f"{name}-{seed}")


def _written(*shape: int) -> torch.Tensor:
    """Return a tensor that the device has still to fill with 0, 1, 2, ..."""
    return torch.empty(shape, device="sim").copy_(counted(*shape), non_blocking=True)


def _state() -> dict[str, Any]:
    """Return a tensor that all ranks have, two that are divided, and one that is not contiguous."""
    mesh = dist.init_device_mesh("sim", (dist.get_world_size(),))
    made: dict[str, Any] = {"all": _written(3, 2)}
    made["rows"] = distribute_tensor(_written(7, 5), mesh, [Shard(0)])
    made["across"] = distribute_tensor(_written(4, 6), mesh, [Shard(1)])
    made["columns"] = _written(4, 6)[:, ::2]
    return made


def _expected() -> dict[str, torch.Tensor]:
    made = {"all": counted(3, 2), "rows": counted(7, 5), "across": counted(4, 6)}
    return made | {"columns": counted(4, 6)[:, ::2]}


def _empty() -> dict[str, Any]:
    """Return the same tensors, which the device has still to fill with 7s."""
    state = _state()
    for tensor in state.values():
        tensor.fill_(7)
    return state


def _check(state: dict[str, Any]) -> None:
    found = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in state.items()}
    assert {n: t.device.type for n, t in found.items()} == dict.fromkeys(found, "sim")
    assert {n: t.cpu().tolist() for n, t in found.items()} == {
        n: t.tolist() for n, t in _expected().items()
    }


def case_saved_and_loaded(rank: int, folder: Path) -> None:
    save(_state(), checkpoint_id=folder)
    state = _empty()
    load(state, checkpoint_id=folder)
    _check(state)


def case_saved_in_the_background(rank: int, folder: Path) -> None:
    """The values at the call, whatever the next step writes."""
    state = _state()
    future = async_save(state, checkpoint_id=folder)
    for tensor in state.values():
        tensor.fill_(7)
    future.result(PATIENCE_S)
    found = _empty()
    load(found, checkpoint_id=folder)
    _check(found)


def case_in_a_stream_of_the_program(rank: int, folder: Path) -> None:
    """Also in threads that read for the load."""
    device = torch.get_device_module("sim")
    pool, num_threads = restoring.ThreadPoolExecutor, restoring.Ranks.num_threads
    restoring.ThreadPoolExecutor = _AtOnce
    restoring.Ranks.num_threads = property(lambda self: 2)
    try:
        with device.stream(device.Stream()):
            state = _state()
            save(state, checkpoint_id=folder)
            for tensor in state.values():
                tensor.fill_(7)
            load(state, checkpoint_id=folder)
            _check(state)
    finally:
        restoring.ThreadPoolExecutor, restoring.Ranks.num_threads = pool, num_threads


class _AtOnce(restoring.ThreadPoolExecutor):
    """Another thread has done all work before the caller continues."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        future = super().submit(fn, *args, **kwargs)
        future.result(PATIENCE_S)
        return future


def case_as_weights(rank: int, folder: Path) -> None:
    """In the format of Hugging Face."""
    state = _state()
    del state["columns"]
    save(state, storage_writer=HuggingFaceStorageWriter(folder))
    found = _empty()
    columns = found.pop("columns")
    load(found, storage_reader=HuggingFaceStorageReader(folder))
    _check(found | {"columns": columns.copy_(counted(4, 6)[:, ::2])})


def case_full_state_on_the_host(rank: int, folder: Path) -> None:
    model = nn.Linear(5, 7, bias=False, device="sim")
    mesh = dist.init_device_mesh("sim", (dist.get_world_size(),))
    model.weight = nn.Parameter(distribute_tensor(_written(7, 5), mesh, [Shard(0)]))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    assert {n: t.tolist() for n, t in state.items()} == (
        {} if rank else {"weight": counted(7, 5).tolist()}
    )


def case_a_run_is_resumed(rank: int, folder: Path) -> None:
    """A model, AdamW's state and the device's random numbers."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)).to("sim")
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 4, device="sim")).sum().backward()
        optimizer.step()

    model, optimizer = made()
    trained(model, optimizer)
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, model=model, optimizer=optimizer)
    trained(model, optimizer)
    other, its_optimizer = made()
    torch.get_device_module("sim").manual_seed(99)
    assert checkpointer.load(model=other, optimizer=its_optimizer) == 1
    trained(other, its_optimizer)
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(one.cpu(), two.cpu()) for one, two in pairs)
