"""`input_reshard`: what backward needs of replicated activations is kept in parts."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dure.comm.pending import wait_tensor
from dure.mesh import DeviceMesh
from dure.tensor.dtensor import DTensor
from dure.tensor.placement_types import Replicate, Shard

__all__ = ["input_reshard"]


def input_reshard(
    module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None
) -> nn.Module:
    """Keep a rank's part, 1 / n, of each replicated activation that backward needs.

    Backward gathers it where it is used. Plain tensors, whose values on other ranks nobody knows,
    and parameters stay as they are.

    Args:
        module: Made parallel by `parallelize_module`; changed in place.
        tp_device_mesh: The mesh, of one axis, of the activations.
        input_reshard_dim: Which dimension is divided, the last where there are fewer, as in the
            matrices that a Linear makes of its input; None: nothing is done.

    Returns:
        The module.

    Collective:
        In backward, all ranks of the mesh: an all_gather for each such activation and use.
    """
    if input_reshard_dim is None:
        return module
    saving: list[_Saving] = []

    def before(_: nn.Module, inputs: object) -> None:
        saving.append(_Saving(module, tp_device_mesh, input_reshard_dim))
        saving[-1].__enter__()

    def after(_: nn.Module, inputs: object, output: object) -> None:
        if saving:  # else a hook before `before` raised
            saving.pop().__exit__()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
    return module


class _Saving(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of one forward. What several operators save is kept once.

    A tensor is known by its storage, whose weak reference keeps the address from being used again.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
        super().__init__(self._keep, self._restore)
        self._mesh, self._dim = mesh, dim
        parts = (p.part for p in module.parameters() if isinstance(p, DTensor))
        self._parameters = {StorageWeakRef(part.untyped_storage()).cdata for part in parts}
        self._kept: dict[object, tuple[StorageWeakRef, weakref.ref[DTensor]]] = {}

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor | tuple[DTensor]:
        """Return a tensor of which a part is kept, in a tuple; or the tensor."""
        if (
            not isinstance(tensor, DTensor)
            or tensor.device_mesh != self._mesh
            or tensor.placements != (Replicate(),)
            or tensor.ndim == 0
        ):
            return tensor
        part = wait_tensor(tensor.part)
        storage = StorageWeakRef(part.untyped_storage())
        if storage.cdata in self._parameters:
            return tensor
        key = (storage.cdata, part.storage_offset(), part.shape, part.stride(), part._version)
        known = self._kept.get(key)
        kept = None if known is None else known[1]()
        if kept is None:
            dim = max(min(self._dim, tensor.ndim - 1), -tensor.ndim)
            with torch.no_grad():
                kept = tensor.redistribute(placements=[Shard(dim)])
            self._kept[key] = storage, weakref.ref(kept)
        return (kept,)

    def _restore(self, kept: torch.Tensor | tuple[DTensor]) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        return kept[0].redistribute(placements=[Replicate()])
