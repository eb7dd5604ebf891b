"""`offload` and `onload`: a model and its optimizer give their memory back for a while.

Tensors stay where they are, and so do views of them and memory that ranks share. Their bytes go to
a file, and the pages that they lie on to the system; `onload` brings the bytes back. So nothing
that holds a tensor has to know.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import torch
from torch import nn

from dure.comm.memory import heap_trim
from dure.errors import DeviceError, UsageError
from dure.parallel.fsdp.explain import states_in
from dure.parallel.fsdp.optimizers import mark_offloaded
from dure.parallel.fsdp.state import FSDPState
from dure.tensor.dtensor import DTensor
from dure.training.memory import give_back_freed, give_back_pages

__all__ = ["offload", "onload"]

_LEAST = 1 << 16  # bytes: what is smaller shares its pages with other memory
_KEPT = "_dure_offloaded"


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """What is in the file, in its order; the file has no name, and goes with this process."""

    file: IO[bytes]
    tensors: list[torch.Tensor]
    parameters: list[nn.Parameter]


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    folder: str | None = None,
) -> int:
    """Write weights, gradients and optimizer state to a file, and give their memory back.

    Between steps; nothing of the model may be used until `onload`. Forward, `state_dict()` and
    the optimizer's step are refused until then.

    Args:
        model: Has sharded modules within, or is one. On the CPU.
        optimizer: Whose state goes, too.
        folder: Of the file, on a disk; the system's folder for temporary files where None. (Where
            that is memory itself, nothing is won.)

    Returns:
        Bytes of this rank that were given back.

    Raises:
        ModuleError: Nothing of the model is sharded.
        UsageError: It is offloaded already.
        DeviceError: Something is not on the CPU.

    Collective:
        All ranks of the mesh: it waits until none of them reads what is shared.

    Cost:
        Writing the bytes once; tensors of less than 64 KiB stay.
    """
    states = states_in(model, "offload")
    if _KEPT in model.__dict__:
        raise UsageError("the model is offloaded already", op="offload", fix="Call onload first.")
    parameters = list(model.parameters())
    tensors = _large(model, optimizer)
    for state in states:
        state.reshard()
        for group in state.groups:
            group.strategy.before_write()
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
    for tensor in tensors:
        file.write(_bytes_of(tensor))
    file.flush()
    given = sum(map(give_back_pages, tensors))
    for state in states:
        for group in state.groups:
            given += sum(map(give_back_pages, group.strategy.recomputed()))
    heap_trim()
    give_back_freed()
    _mark(states, parameters, True)
    model.__dict__[_KEPT] = _Offloaded(file, tensors, parameters)
    return given


def onload(model: nn.Module) -> None:
    """Bring back what `offload` has given away.

    Args:
        model: That was given to `offload`.

    Raises:
        UsageError: It is not offloaded.

    Cost:
        Reading the bytes once.
    """
    kept: _Offloaded | None = model.__dict__.pop(_KEPT, None)
    if kept is None:
        raise UsageError("the model is not offloaded", op="onload", seen=type(model).__name__)
    with kept.file as file:
        file.seek(0)
        for tensor in kept.tensors:
            file.readinto(_bytes_of(tensor))  # pyright: ignore
    _mark(states_in(model, "onload"), kept.parameters, False)


def _large(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return the memory of parameters, gradients and state that is worth giving back, once each."""
    found: dict[int, torch.Tensor] = {}
    for tensor in _all(model, optimizer):
        local = tensor.part if isinstance(tensor, DTensor) else tensor.detach()
        if local.device.type != "cpu":
            raise DeviceError(
                "only memory of the CPU is given back", op="offload", seen=f"{local.device}"
            )
        if local.nbytes >= _LEAST and local.is_contiguous():
            found[local.data_ptr()] = local
    return list(found.values())


def _all(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # pyright: ignore


def _mark(states: list[FSDPState], parameters: list[nn.Parameter], offloaded: bool) -> None:
    for state in states:
        state.is_offloaded, state.is_checked = offloaded, False
    for parameter in parameters:
        mark_offloaded(parameter, offloaded)
