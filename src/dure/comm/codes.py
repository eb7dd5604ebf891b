"""Codes of dtypes and reductions that torch and the engine share.

Importing this module passes the engine the classes of torch with which it reads tensors, and the
folders of libraries, by which it finds the program's frames.
"""

from __future__ import annotations

import torch

from dure import torch_private
from dure.comm.ops import REDUCTIONS, ReduceOp
from dure.native import know_torch, set_library_folders
from dure.trace import hooks
from dure.trace.frames import library_folders

_REDUCIBLE = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
    *("complex32", "complex64", "complex128"),
)
# The codes of csrc/core/types.h. Other dtypes of torch move as opaque bytes; sorting their names
# gives each the same code on all ranks.
_DTYPE: dict[torch.dtype, int] = {getattr(torch, name): i for i, name in enumerate(_REDUCIBLE)}
_OTHERS = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)} - _DTYPE.keys(), key=str
)
_DTYPE.update({dtype: len(_REDUCIBLE) + i for i, dtype in enumerate(_OTHERS)})
_NAMES = [str(dtype).removeprefix("torch.") for dtype in _DTYPE]


def dtype_code(dtype: torch.dtype) -> int:
    """Return the engine's code of `dtype`."""
    return _DTYPE[dtype]


def dtype_name(code: int) -> str:
    """Return the name of the dtype with this code, such as "float32"."""
    return _NAMES[code]


with torch.inference_mode(False):  # inference tensors have no version
    _sample = torch.empty(0, device="cpu")
know_torch(
    torch.Tensor,
    torch.nn.Parameter,
    [getattr(ReduceOp, n) for n in REDUCTIONS],
    torch_private.bindings,
    _sample,
    hooks,
)
set_library_folders(list(library_folders()))
