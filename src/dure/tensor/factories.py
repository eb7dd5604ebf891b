"""DTensors made from nothing: `ones`, `zeros`, `empty`, `full`, `rand`, `randn`.

Constant ones are made part by part. Random ones are those of the unsharded run: every rank draws
the whole and keeps its part, so values do not depend on the mesh, and all generators go on alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dure.errors import PlacementError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor.dtensor import DTensor, mesh_or_current, wrap
from dure.tensor.placement_types import Placement, Replicate
from dure.tensor.random import drawn
from dure.tensor.redistribute import redistribute
from dure.tensor.spec import DTensorSpec, TensorMeta, as_placements, spec_of

__all__ = ["empty", "full", "ones", "rand", "randn", "zeros"]

Sizes = int | Sequence[int]


def _spec(
    op: str,
    size: Sequence[Sizes],
    dtype: torch.dtype | None,
    layout: torch.layout,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> DTensorSpec:
    if layout != torch.strided:
        raise UsageError("a DTensor is strided", op=op, seen=f"{layout}")
    one = size[0] if len(size) == 1 else None
    shape = torch.Size(one if isinstance(one, Sequence) else size)  # pyright: ignore
    mesh = mesh_or_current(mesh, op)
    given = as_placements(placements, mesh, len(shape), op)
    if any(p.is_partial() for p in given):
        raise PlacementError(
            "a tensor is not made as terms", op=op, seen=f"{given}",
            fix="Use DTensor.from_local with Partial().",
        )  # fmt: skip
    whole = torch.empty(shape, dtype=dtype, device="meta")
    return spec_of(mesh, given, TensorMeta.of(whole))


def _made(
    make: Callable[..., torch.Tensor], spec: DTensorSpec, requires_grad: bool, *args: Any
) -> DTensor:
    """Make each rank's part by itself."""
    local = make(spec.local_shape, *args, dtype=spec.meta.dtype, device=spec.mesh.device_type)
    return wrap(local, spec).requires_grad_(requires_grad)  # pyright: ignore[reportReturnType]


def _drawn(make: Callable[..., torch.Tensor], spec: DTensorSpec, requires_grad: bool) -> DTensor:
    """Draw the whole and keep this rank's part."""
    kind = {"dtype": spec.meta.dtype, "device": spec.mesh.device_type}
    whole = drawn(spec.mesh, lambda: make(spec.shape, **kind))
    alike = spec.with_placements((Replicate(),) * spec.mesh.ndim)
    local = whole.new_empty(0) if spec.coordinate is None else redistribute(whole, alike, spec)
    return wrap(local, spec).requires_grad_(requires_grad)  # pyright: ignore[reportReturnType]


def ones(
    *size: Sizes,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a DTensor of ones.

    Args:
        size: The whole tensor's shape, as numbers or one sequence.
        dtype: torch's default where None.
        layout: ``torch.strided``.
        requires_grad: Whether autograd is to follow it.
        device_mesh: The mesh; that of ``with mesh:`` where None.
        placements: One for each axis; replicated where None.

    Raises:
        PlacementError: `Partial`, or placements that do not fit.

    Cost:
        Memory and time of this rank's part; nothing is sent.
    """
    spec = _spec("ones", size, dtype, layout, device_mesh, placements)
    return _made(torch.ones, spec, requires_grad)


def zeros(
    *size: Sizes,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a DTensor of zeros.

    Args, Raises, Cost: as `ones`.
    """
    spec = _spec("zeros", size, dtype, layout, device_mesh, placements)
    return _made(torch.zeros, spec, requires_grad)


def empty(
    *size: Sizes,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a DTensor without values yet.

    Args, Raises, Cost: as `ones`.
    """
    spec = _spec("empty", size, dtype, layout, device_mesh, placements)
    return _made(torch.empty, spec, requires_grad)


def full(
    size: Sizes,
    fill_value: complex,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return a DTensor of one number.

    Args:
        size: The whole tensor's shape.
        fill_value: The number.
        dtype: That of the number where None.

    Other Args, Raises, Cost: as `ones`.
    """
    spec = _spec(
        "full", (size,), dtype or torch.full((), fill_value).dtype, layout, device_mesh, placements
    )
    return _made(torch.full, spec, requires_grad, fill_value)


def rand(
    *size: Sizes,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return uniform random numbers of [0, 1), those of the unsharded run.

    Args, Raises: as `ones`.

    Cost:
        Every rank draws the whole tensor, and has it in memory meanwhile; nothing is sent.
    """
    spec = _spec("rand", size, dtype, layout, device_mesh, placements)
    return _drawn(torch.rand, spec, requires_grad)


def randn(
    *size: Sizes,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return normal random numbers, those of the unsharded run.

    Args, Raises: as `ones`.

    Cost:
        Every rank draws the whole tensor, and has it in memory meanwhile; nothing is sent.
    """
    spec = _spec("randn", size, dtype, layout, device_mesh, placements)
    return _drawn(torch.randn, spec, requires_grad)
