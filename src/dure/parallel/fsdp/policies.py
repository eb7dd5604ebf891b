"""Policies of `fully_shard`: dtypes, offloading of shards, the mesh's data axes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from dure.training.precision import check_floating

__all__ = ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a group of parameters computes and reduces; shards keep their own.

    Attributes:
        param_dtype: Of the unsharded parameters, and of forward's inputs; None leaves it.
        reduce_dtype: In which gradients are reduced; where None, the dtype that they come in.
        output_dtype: Of forward's floating-point outputs; None leaves it.
        cast_forward_inputs: Cast floating-point inputs of forward to `param_dtype`.

    Example:
        ```python
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fsdp.fully_shard(torch.nn.Linear(4, 4), mp_policy=policy)
        assert model(torch.ones(1, 4)).dtype is torch.bfloat16
        ```
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        check_floating(self, "param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards, gradients and optimizer state stay: on the mesh's device, or in files.

    Attributes:
        path: A folder, for models that are larger than the host's memory: they stay in files
            there, which the kernel reads and writes back as memory is needed. The same folder on
            all ranks of a host. None: they stay in memory.

    Example:
        ```python
        Path("offloaded").mkdir(exist_ok=True)
        policy = fsdp.OffloadPolicy(path="offloaded")  # files in place of memory
        model = fsdp.fully_shard(torch.nn.Linear(4, 4), offload_policy=policy)
        ```
    """

    path: str | os.PathLike[str] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state stay in the host's memory, while the device computes.

    On a mesh of CPUs they do anyway.

    Attributes:
        path: As for `OffloadPolicy`.
        pin_memory: Keep them in page-locked memory, which a device copies while the host continues,
            if the device's module of torch has an allocator for it.

    Example:
        ```python
        model = fsdp.fully_shard(torch.nn.Linear(4, 4), offload_policy=fsdp.CPUOffloadPolicy())
        ```
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a mesh with names are data parallel; the others are DTensor parameters'.

    Attributes:
        shard: One name, or several that are taken as one axis.
        replicate: The same for the axis of replicas.

    Example:
        ```python
        axes = fsdp.DataParallelMeshDims(shard="fsdp", replicate="dp")
        ```
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None
