"""Factories of DTensors: `ones`, `zeros`, `empty`, `full`, `rand`, `randn`.

Each rank creates its part of a constant tensor. For random tensors every rank draws the full tensor
and keeps its part: values are those of the unsharded run and do not depend on the mesh, and all
generators end in the same state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import torch

from dure.errors import PlacementError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor.dtensor import DTensor, mesh_or_current
from dure.tensor.placement_types import Placement
from dure.tensor.random import drawn
from dure.tensor.redistribute import redistribute
from dure.tensor.spec import TensorMeta, as_placements, spec_of
from dure.tensor.wrapping import wrap

__all__ = ["FactoryOptions", "empty", "full", "ones", "rand", "randn", "zeros"]

Sizes = int | Sequence[int]


class FactoryOptions(TypedDict, total=False):
    """Keyword arguments of all factories.

    Attributes:
        dtype: The dtype; if None, torch's default dtype, and for `full` the dtype of the number.
        layout: Must be ``torch.strided``.
        requires_grad: Whether autograd records operators on the tensor.
        device_mesh: The mesh; if None, the one of the enclosing ``with mesh:`` block.
        placements: One placement per mesh axis; if None, all are Replicate.
    """

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    device_mesh: DeviceMesh | None
    placements: Sequence[Placement] | None


_RANDOM = torch.rand, torch.randn


def _made(
    make: Callable[..., torch.Tensor],
    size: Sequence[Sizes],
    *args: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Create this rank's part, or draw the full tensor and keep this rank's part."""
    op = make.__name__
    if layout != torch.strided:
        raise UsageError("layout must be torch.strided", op=op, seen=f"{layout}")
    one = size[0] if len(size) == 1 else None
    shape = torch.Size(one if isinstance(one, Sequence) else size)  # pyright: ignore
    mesh = mesh_or_current(device_mesh, op)
    given = as_placements(placements, mesh, len(shape), op)
    if any(p.is_partial() for p in given):
        raise PlacementError(
            "placements of a factory must be Shard or Replicate", op=op, seen=f"{given}",
            fix="Use DTensor.from_local for Partial().",
        )  # fmt: skip
    spec = spec_of(mesh, given, TensorMeta.of(torch.empty(shape, dtype=dtype, device="meta")))
    kind: Any = {"dtype": spec.meta.dtype, "device": mesh.device_type}
    if make not in _RANDOM:
        local = make(spec.local_shape, *args, **kind)
    else:
        equal_along = [axis for axis, p in enumerate(given) if not p.is_shard()]
        values = drawn(mesh, lambda: make(shape, **kind), equal_along=equal_along)
        inside = spec.coordinate is not None
        local = redistribute(values, spec.replicated(), spec) if inside else values.new_empty(0)
    return wrap(local, spec).requires_grad_(requires_grad)  # pyright: ignore[reportReturnType]


def ones(*size: Sizes, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return a DTensor of ones.

    Args:
        size: Shape of the full tensor, as numbers or one sequence.
        options: Keyword arguments: `dtype` (torch's default if None), `layout` (torch.strided),
            `requires_grad`, `device_mesh` (if None, that of the enclosing ``with mesh:`` block)
            and `placements` (one per mesh axis; if None, all are Replicate).

    Returns:
        The DTensor.

    Raises:
        MeshError: No mesh.
        PlacementError: `Partial`, or placements that do not fit.
        UsageError: Another layout than torch.strided.

    Cost:
        Memory and time of this rank's part; no communication.

    Example:
        ```python
        from dure.tensor import Shard, init_device_mesh, ones, rand

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = ones(4, 3, device_mesh=mesh, placements=[Shard(0)])
        assert x.shape == (4, 3) and x.to_local().shape == (2, 3)
        assert rand(4, 3, device_mesh=mesh, placements=[Shard(0)]).full_tensor().max() < 1
        ```
    """
    return _made(torch.ones, size, **options)


def zeros(*size: Sizes, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return a DTensor of zeros.

    Args:
        size: Shape of the full tensor, as numbers or one sequence.
        options: As for `ones`; so are results, errors and cost.

    Example:
        ```python
        from dure.tensor import Shard, empty, full, rand, randn, zeros

        mesh = dist.init_device_mesh("cpu", (2,))
        x = zeros(4, 3, device_mesh=mesh, placements=[Shard(0)])
        assert x.shape == (4, 3) and x.to_local().shape == (2, 3)
        ```
    """
    return _made(torch.zeros, size, **options)


def empty(*size: Sizes, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return an uninitialized DTensor.

    Args:
        size: Shape of the full tensor, as numbers or one sequence.
        options: As for `ones`; so are results, errors and cost.

    Example:
        ```python
        x = empty(4, 3, device_mesh=mesh, placements=[Shard(1)])
        assert x.shape == (4, 3)
        ```
    """
    return _made(torch.empty, size, **options)


def full(size: Sizes, fill_value: complex, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return a DTensor filled with one number.

    Args:
        size: Shape of the full tensor.
        fill_value: The number; it determines the dtype if `dtype` is None.
        options: As for `ones`; so are results, errors and cost.

    Example:
        ```python
        x = full((4,), 2.0, device_mesh=mesh, placements=[Shard(0)])
        assert x.to_local().tolist() == [2.0, 2.0]
        ```
    """
    options["dtype"] = options.get("dtype") or torch.full((), fill_value).dtype
    return _made(torch.full, (size,), fill_value, **options)


def rand(*size: Sizes, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return uniform random numbers in [0, 1), the same as in an unsharded run.

    Args:
        size: Shape of the full tensor, as numbers or one sequence.
        options: As for `ones`.

    Returns:
        The DTensor. Values do not depend on mesh and placements if all ranks have the same seed.

    Raises:
        Desync: Generators of ranks along an axis that replicates the tensor are in different
            states.
        PlacementError: As for `ones`.

    Collective:
        All ranks of the mesh if an axis replicates the tensor: 16 bytes are compared.

    Cost:
        Every rank draws the full tensor, and temporarily has it in memory.

    Example:
        ```python
        torch.manual_seed(0)
        x = rand(4, device_mesh=mesh, placements=[Shard(0)])
        torch.manual_seed(0)
        assert torch.equal(x.full_tensor(), torch.rand(4))  # as without a mesh
        ```
    """
    return _made(torch.rand, size, **options)


def randn(*size: Sizes, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return normal random numbers (mean 0, variance 1), the same as in an unsharded run.

    Args:
        size: Shape of the full tensor, as numbers or one sequence.
        options: As for `ones`; results, errors and cost are those of `rand`.

    Example:
        ```python
        torch.manual_seed(0)
        x = randn(4, device_mesh=mesh, placements=[Shard(0)])
        torch.manual_seed(0)
        assert torch.equal(x.full_tensor(), torch.randn(4))
        ```
    """
    return _made(torch.randn, size, **options)


_options = [p for p in inspect.signature(_made).parameters.values() if p.kind is p.KEYWORD_ONLY]
for _factory in (ones, zeros, empty, full, rand, randn):  # help() shows the keyword arguments
    _signature = inspect.signature(_factory)
    _before = [p for p in _signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    _signature = _signature.replace(parameters=[*_before, *_options])
    setattr(_factory, "__signature__", _signature)  # noqa: B010
