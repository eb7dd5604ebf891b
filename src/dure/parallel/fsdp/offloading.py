"""`offload` and `onload`: a model and its optimizer give their memory back for a while.

Tensors keep their addresses, and so do views of them and memory that ranks share. Their bytes are
written to a file, and their pages returned to the system; `onload` reads the bytes back. So code
that holds a tensor is not affected.
"""

from __future__ import annotations

import tempfile
from typing import IO

import torch
from torch import nn

from dure.comm.memory import heap_trim
from dure.errors import DeviceError, UsageError
from dure.parallel.fsdp.state import FSDPState, states_in
from dure.training.grad_views import own_part
from dure.training.memory import give_back_freed, give_back_pages
from dure.training.optimizers import mark_offloaded

__all__ = ["offload", "onload"]

_LEAST = 1 << 16  # bytes: smaller tensors share their pages with other memory
_KEPT = "_dure_offloaded"
Offloaded = tuple[IO[bytes], list[torch.Tensor], list[nn.Parameter]]
"""An unnamed file, which ends with this process; the tensors in it; parameters to refuse."""


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
        Writing the bytes once; tensors of less than 64 KiB stay, and page-locked ones.

    Example:
        ```python
        model = fsdp.fully_shard(torch.nn.Linear(256, 256))
        before = model.weight.full_tensor()
        num_bytes = fsdp.offload(model, folder=".")
        assert num_bytes > 0
        ```
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
    model.__dict__[_KEPT] = file, tensors, parameters
    return given


def onload(model: nn.Module) -> None:
    """Bring back what `offload` has given away.

    Args:
        model: That was given to `offload`.

    Raises:
        UsageError: It is not offloaded.

    Cost:
        Reading the bytes once.

    Example:
        ```python
        fsdp.onload(model)
        assert torch.equal(model.weight.full_tensor(), before)
        ```
    """
    kept: Offloaded | None = model.__dict__.pop(_KEPT, None)
    if kept is None:
        raise UsageError("the model is not offloaded", op="onload", seen=type(model).__name__)
    file, tensors, parameters = kept
    with file:
        file.seek(0)
        for tensor in tensors:
            file.readinto(_bytes_of(tensor))  # pyright: ignore
    _mark(states_in(model, "onload"), parameters, False)


def _large(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Return the memory of parameters, gradients and state that is worth giving back, once each."""
    states = optimizer.state.values() if optimizer is not None else ()
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    tensors += [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        local = own_part(tensor).detach()
        if local.device.type != "cpu":
            raise DeviceError(
                "only memory of the CPU is given back", op="offload", seen=f"{local.device}"
            )
        if local.nbytes >= _LEAST and local.is_contiguous() and not local.is_pinned():
            found[local.data_ptr()] = local
    return list(found.values())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # pyright: ignore


def _mark(states: list[FSDPState], parameters: list[nn.Parameter], offloaded: bool) -> None:
    for state in states:
        state.is_offloaded, state.is_checked = offloaded, False
    for parameter in parameters:
        mark_offloaded(parameter, offloaded)
