"""Full weights for a limited time: all of them, to edit, or one by one, to send elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dure.errors import ShapeError
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.state import states_in
from dure.tensor.distribute import distribute_tensor
from dure.tensor.dtensor import DTensor

__all__ = ["full_parameters", "stream_full"]


@contextmanager
def full_parameters(model: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Have modules hold full, plain parameters inside a block, in the dtype of the shards.

    Each rank has copies of its own, and may read and change them in place or assign others. It is
    for between steps: forward is refused inside.

    Args:
        model: Has sharded modules within, or is one.
        writeback: Afterwards each rank takes its shards from its copies, which all ranks have
            changed the same way; otherwise, or if the block raises, changes are lost.

    Raises:
        ModuleError: Nothing of the model is sharded.
        ShapeError: A parameter of another shape was assigned, and is to be written back.

    Collective:
        All ranks of the mesh, on entering.

    Cost:
        An all_gather per parameter; the memory of the full model on each rank.

    Example:
        ```python
        model = fsdp.fully_shard(torch.nn.Linear(8, 8))
        with fsdp.full_parameters(model, writeback=True), torch.no_grad():
            model.weight.zero_()
        assert model.weight.full_tensor().sum() == 0
        ```
    """
    groups = [group for s in states_in(model, "full_parameters") for group in s.groups]
    for group in groups:
        group.reshard()
        group.adopt()
    parameters = [p for group in groups for p in group.parameters]
    for parameter in parameters:
        shard: Any = parameter.sharded
        with torch.no_grad():
            unsharded = nn.Parameter(shard.full_tensor(), requires_grad=shard.requires_grad)
        for module, name in parameter.places:
            setattr(module, name, unsharded)
    try:
        yield
        if writeback:
            edited = [_checked(p) for p in parameters]
            for group in groups:
                group.strategy.before_write()
            for parameter, unsharded in zip(parameters, edited, strict=True):
                spec = parameter.spec
                with torch.no_grad():
                    parameter.sharded.copy_(
                        distribute_tensor(unsharded, spec.mesh, spec.placements, src_data_rank=None)
                    )
    finally:
        for parameter in parameters:
            parameter.to_sharded(keeps_assigned=False)


def _checked(parameter: FSDPParameter) -> torch.Tensor:
    module, name = parameter.places[0]
    unsharded: torch.Tensor = getattr(module, name).detach()
    if unsharded.shape != parameter.sharded.shape:
        raise ShapeError(
            "a full parameter cannot be written back",
            op="full_parameters",
            seen=f"{parameter.name} is {list(parameter.sharded.shape)}, its new value "
            f"{list(unsharded.shape)}",
            fix="Change the shape of a parameter before fully_shard.",
        )
    return unsharded


def stream_full(
    model: nn.Module, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over a model's parameters and persistent buffers: names and full tensors.

    For samplers and exporters. Names are those of `state_dict()`. Plain tensors among sharded ones
    are yielded as they are.

    Args:
        model: Any module.
        dtype: Of floating-point tensors; None leaves it.

    Yields:
        A name and its tensor, which is freed when the program drops it.

    Collective:
        All ranks of the mesh iterate over it to its end.

    Cost:
        An all_gather per sharded tensor, in `dtype`; the memory of one at a time.

    Example:
        ```python
        model = fsdp.fully_shard(torch.nn.Linear(8, 8))
        sizes = {name: tensor.numel() for name, tensor in fsdp.stream_full(model)}
        assert sizes == {"weight": 64, "bias": 8}
        ```
    """
    with torch.no_grad():
        state = model.state_dict()
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            yield name, _full(tensor, dtype)


def _full(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    with torch.no_grad():
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
