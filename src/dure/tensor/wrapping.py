"""Wrap a part as a DTensor, and return the parts of DTensors; natively if the extension was built.

The definition is in Python: `wrap` and `parts_of` here, `dispatch` in dispatch.py, `read_grad` in
dtensor.py. The extension (csrc/dispatch/hits.cpp) does the same faster; tests run the same cases in
both (tests/tensor/ranks/test_dispatch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure import torch_private
from dure.tensor.spec import DTensorSpec

if TYPE_CHECKING:
    from dure.tensor.dtensor import DTensor

try:
    from dure.tensor import _hits as native  # pyright: ignore[reportMissingModuleSource]
except ImportError:  # not built here
    native = None

__all__ = ["bind", "dtensor_type", "make_wrapper", "native", "parts_in_python", "parts_of", "wrap"]

make_wrapper = torch_private.make_wrapper_subclass
is_in_inference = torch.is_inference_mode_enabled
_type: type[DTensor]


def bind(cls: type[DTensor]) -> None:
    """Set the class that `wrap` makes, which is defined in a file that imports this one."""
    global _type
    _type = cls


def dtensor_type() -> type[DTensor]:
    """Return the class `DTensor`."""
    return _type


def wrap_in_python(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor over a part that needs no gradient."""
    if is_in_inference():  # torch cannot make an inference tensor of a view of an ordinary wrapper
        with torch.inference_mode(False):
            return wrap_in_python(local, spec)
    meta = spec.meta
    made = make_wrapper(
        _type, meta.shape, strides=meta.stride, dtype=meta.dtype, device=local.device
    )
    made.part = local
    made.spec = spec
    made.copied_at = None
    return made


def parts_in_python(tensors: Sequence[Any], specs: list[DTensorSpec | None]) -> list[Any] | None:
    """Return the part of each tensor, or None if one does not have the given spec.

    A spec of None requires a plain tensor, which is returned as it is. Views that are copies fit no
    spec.
    """
    found: list[Any] = []
    for tensor, spec in zip(tensors, specs, strict=True):
        if type(tensor) is _type and tensor.spec is spec and tensor.copied_at is None:
            found.append(tensor.part)
        elif spec is None and type(tensor) is not _type:
            found.append(tensor)
        else:
            return None
    return found


wrap = wrap_in_python if native is None else native.wrap
parts_of = parts_in_python if native is None else native.parts
