"""`input_reshard`: replicated activations saved for backward are kept sharded."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dure.comm.pending import wait_tensor
from dure.comm.untraced import untraced_here
from dure.mesh import DeviceMesh
from dure.tensor.dtensor import DTensor
from dure.tensor.placement_types import Replicate, Shard

__all__ = ["input_reshard"]


def input_reshard(
    module: nn.Module, tp_device_mesh: DeviceMesh, input_reshard_dim: int | None = None
) -> nn.Module:
    """Shard the replicated activations that are saved for backward: each rank keeps 1 / n of them.

    Backward gathers an activation when it is used. Plain tensors, which may differ between ranks,
    and parameters stay as they are.

    Args:
        module: A module parallelized by `parallelize_module`; changed in place.
        tp_device_mesh: The mesh of the activations, of one axis.
        input_reshard_dim: The dimension that is sharded; the last one for activations with fewer
            dimensions, such as the matrices that a Linear makes of its input. If None, the module
            is not changed.

    Returns:
        The module.

    Collective:
        In backward, all ranks of the mesh: one all_gather for each such activation and use.

    Example:
        ```python
        from dure.tensor.parallel import SequenceParallel, parallelize_module
        from dure.tensor.parallel.input_reshard import input_reshard

        mesh = dist.init_device_mesh("cpu", (2,))
        model = torch.nn.Sequential(torch.nn.LayerNorm(4))
        model = input_reshard(parallelize_module(model, mesh, {"0": SequenceParallel()}), mesh, 0)
        ```
    """
    if input_reshard_dim is None:
        return module
    module._dure_input_reshard = tp_device_mesh, input_reshard_dim  # pyright: ignore
    if not isinstance(module, _Resharding):
        module.__class__ = _class_of(type(module))
    return module


class _Resharding:
    """A module whose forward saves activations sharded.

    Hooks of the module would not do: torch does not run them after a KeyboardInterrupt or
    SystemExit, and then later forwards would save sharded activations, too.
    """

    _dure_input_reshard: tuple[DeviceMesh, int]

    @untraced_here
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        assert isinstance(self, nn.Module)
        with _Saving(self, *self._dure_input_reshard):
            return super().__call__(*args, **kwargs)  # pyright: ignore


@cache
def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of the same name that saves activations sharded."""
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Resharding, kind), named)


class _Saving(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of one forward. A tensor that several operators save is kept once.

    Tensors are identified by their storage; a weak reference keeps its address from being reused.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, dim: int) -> None:
        super().__init__(self._keep, self._restore)
        self._mesh, self._dim = mesh, dim
        parts = (p.part for p in module.parameters() if isinstance(p, DTensor))
        self._parameters = {StorageWeakRef(part.untyped_storage()).cdata for part in parts}
        self._kept: dict[object, tuple[StorageWeakRef, weakref.ref[DTensor]]] = {}

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor | tuple[DTensor]:
        """Return the sharded tensor in a tuple, or the tensor itself if it is kept unchanged."""
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
