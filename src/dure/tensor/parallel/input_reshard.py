"""`input_reshard`: what a module keeps for backward is kept in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dure.mesh import DeviceMesh
from dure.tensor.dtensor import DTensor, part_of
from dure.tensor.placement_types import Replicate, Shard

__all__ = ["input_reshard"]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor of which each rank keeps a part, and whether it is given back as a plain one."""

    tensor: DTensor
    plain: bool


def input_reshard(
    module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None
) -> nn.Module:
    """Let the ranks of an axis keep a part each of what a module saves for backward.

    In tensor parallelism the inputs of a layer are the same on all ranks. Parameters, and DTensors
    that are sharded, are left as they are.

    Args:
        module: The module. Plain tensors that it saves must be the same on all ranks.
        tp_device_mesh: A mesh of one axis.
        input_reshard_dim: The dimension that is cut; None: nothing is done.

    Returns:
        The module.

    Collective:
        Backward, of all ranks of the mesh.

    Cost:
        An all_gather of each tensor in backward, for 1/n of its memory until then.

    Source:
        https://arxiv.org/abs/2205.05198, section 4.2.2.
    """
    if input_reshard_dim is None:
        return module
    dim = input_reshard_dim
    entered: list[Any] = []

    def pack(x: torch.Tensor) -> Any:
        if not -x.ndim <= dim < x.ndim or any(
            isinstance(t, nn.Parameter)
            for t in (x, x._base)  # pyright: ignore
        ):
            return x
        plain = not isinstance(x, DTensor)
        whole: Any = DTensor.from_local(x.detach(), tp_device_mesh) if plain else x.detach()
        if whole.device_mesh != tp_device_mesh or not whole.spec.is_replicated():
            return x
        return _Kept(whole.redistribute(placements=[Shard(dim)]), plain)

    def unpack(kept: Any) -> torch.Tensor:
        if not isinstance(kept, _Kept):
            return kept
        whole = kept.tensor.redistribute(placements=[Replicate()])
        return part_of(whole) if kept.plain else whole

    def before(_: nn.Module, inputs: object) -> None:
        entered.append(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        entered[-1].__enter__()

    def after(_: nn.Module, inputs: object, outputs: object) -> None:
        entered.pop().__exit__()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
    return module
