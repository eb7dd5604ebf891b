"""DTensors made from nothing: `ones`, `zeros`, `empty`, `full`, `rand`, `randn`.

Constant ones are made part by part. Random ones are those of the unsharded run: every rank draws
the whole and keeps its part, so values do not depend on the mesh, and all generators go on alike.
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

__all__ = ["Options", "empty", "full", "ones", "rand", "randn", "zeros"]

Sizes = int | Sequence[int]


class Options(TypedDict, total=False):
    """What all factories take by keyword.

    Attributes:
        dtype: torch's default where None; that of the number for `full`.
        layout: ``torch.strided``.
        requires_grad: Whether autograd is to follow it.
        device_mesh: The mesh; that of ``with mesh:`` where None.
        placements: One for each axis; replicated where None.
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
    """Make each rank's part by itself, or draw the whole and keep this rank's part."""
    op = make.__name__
    if layout != torch.strided:
        raise UsageError("a DTensor is strided", op=op, seen=f"{layout}")
    one = size[0] if len(size) == 1 else None
    shape = torch.Size(one if isinstance(one, Sequence) else size)  # pyright: ignore
    mesh = mesh_or_current(device_mesh, op)
    given = as_placements(placements, mesh, len(shape), op)
    if any(p.is_partial() for p in given):
        raise PlacementError(
            "a tensor is not made as terms", op=op, seen=f"{given}",
            fix="Use DTensor.from_local with Partial().",
        )  # fmt: skip
    spec = spec_of(mesh, given, TensorMeta.of(torch.empty(shape, dtype=dtype, device="meta")))
    kind: Any = {"dtype": spec.meta.dtype, "device": mesh.device_type}
    if make not in _RANDOM:
        local = make(spec.local_shape, *args, **kind)
    else:
        equal_along = [axis for axis, p in enumerate(given) if not p.is_shard()]
        whole = drawn(mesh, lambda: make(shape, **kind), equal_along=equal_along)
        inside = spec.coordinate is not None
        local = redistribute(whole, spec.replicated(), spec) if inside else whole.new_empty(0)
    return wrap(local, spec).requires_grad_(requires_grad)  # pyright: ignore[reportReturnType]


def ones(*size: Sizes, **options: Unpack[Options]) -> DTensor:
    """Return a DTensor of ones.

    Args:
        size: The whole tensor's shape, as numbers or one sequence.
        options: dtype, layout, requires_grad, device_mesh, placements: see `Options`.

    Raises:
        PlacementError: `Partial`, or placements that do not fit.

    Cost:
        Memory and time of this rank's part; nothing is sent.
    """
    return _made(torch.ones, size, **options)


def zeros(*size: Sizes, **options: Unpack[Options]) -> DTensor:
    """Return a DTensor of zeros; all else as `ones`."""
    return _made(torch.zeros, size, **options)


def empty(*size: Sizes, **options: Unpack[Options]) -> DTensor:
    """Return a DTensor without values yet; all else as `ones`."""
    return _made(torch.empty, size, **options)


def full(size: Sizes, fill_value: complex, **options: Unpack[Options]) -> DTensor:
    """Return a DTensor of one number; all else as `ones`.

    Args:
        size: The whole tensor's shape.
        fill_value: The number.
        options: As for `ones`.
    """
    options["dtype"] = options.get("dtype") or torch.full((), fill_value).dtype
    return _made(torch.full, (size,), fill_value, **options)


def rand(*size: Sizes, **options: Unpack[Options]) -> DTensor:
    """Return uniform random numbers of [0, 1), those of the unsharded run.

    Args, Raises: as `ones`.

    Cost:
        Every rank draws the whole tensor, and has it in memory meanwhile; nothing is sent.
    """
    return _made(torch.rand, size, **options)


def randn(*size: Sizes, **options: Unpack[Options]) -> DTensor:
    """Return normal random numbers, those of the unsharded run; all else as `rand`."""
    return _made(torch.randn, size, **options)


_options = [p for p in inspect.signature(_made).parameters.values() if p.kind is p.KEYWORD_ONLY]
for _factory in (ones, zeros, empty, full, rand, randn):  # what help() shows
    _own = inspect.signature(_factory)
    _before = [p for p in _own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    setattr(_factory, "__signature__", _own.replace(parameters=[*_before, *_options]))  # noqa: B010
