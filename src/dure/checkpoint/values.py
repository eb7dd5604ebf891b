"""Converting values of a state, which are no containers and no tensors, to JSON and back.

JSON's own types are stored as they are. Any other value is stored as a kind and JSON data, and is
decoded to the type that it had. Types that are not in the tables below are refused, and so are
subclasses, since what they add would be lost. Nothing here imports or runs what a file names.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from dure.errors import UsageError

__all__ = ["PLAIN", "VALUES", "decode_value", "encode_value"]

PLAIN = frozenset({bool, int, str})
"""Types of values that are stored as they are."""
_ARRAYS = "biufc"
"""The kinds of numpy's numbers: bool, int, unsigned int, float, complex."""


def encode_value(value: object, path: str) -> tuple[str, Any] | None:
    """Return a value's kind and its JSON data; None: it is JSON already.

    Raises:
        UsageError: It cannot be saved; the message names `path`.
    """
    kind = type(value)
    if value is None or kind in PLAIN or (kind is float and math.isfinite(value)):  # pyright: ignore
        return None
    if kind in _CODES:
        name, encode = _CODES[kind]
        return name, encode(value)
    if isinstance(value, np.generic) or kind in (np.ndarray, np.memmap):
        array: Any = value
        if array.dtype.kind in _ARRAYS:
            name = "scalar" if isinstance(value, np.generic) else "array"
            return name, [array.dtype.str, list(array.shape), _text(array.tobytes())]
    raise UsageError(
        "a value cannot be saved in a checkpoint",
        seen=f"{path} is a {kind.__module__}.{kind.__qualname__}",
        fix=_fix_for(value),
    )


def _fix_for(value: object) -> str:
    if isinstance(value, Enum):
        return "Save its name or its value, and create the enum from it after loading."
    if isinstance(value, str | bytes | bytearray):
        base = next(t for t in (str, bytes, bytearray) if isinstance(value, t))
        return f"Save a plain {base.__name__}: {base.__name__}(...) makes one."
    return (
        "Let state_dict() return tensors, numbers, strings, and lists, tuples, sets and dicts of "
        "them."
    )


def decode_value(kind: str, value: Any) -> Any:
    """Return what `encode_value` was given.

    Raises:
        KeyError: There is no such kind.
        ValueError, TypeError, RuntimeError: The kind has no such value.
    """
    return VALUES[kind](value)


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any) -> bytes:
    """Decode base64; a text with any other character is refused."""
    return base64.b64decode(_string(text), validate=True)


def _string(text: Any) -> str:
    if type(text) is not str:
        raise TypeError(f"expected a string, got a {type(text).__name__}")
    return text


def _list(items: Any, length: int) -> list[Any]:
    if type(items) is not list or len(items) != length:
        raise TypeError(f"expected a list of {length} items")
    return items


def _complex(value: Any) -> complex:
    real, imag = _list(value, 2)
    return complex(float(_string(real)), float(_string(imag)))


def _array(value: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = _list(value, 3)
    kind = np.dtype(_string(dtype))
    if kind.kind not in _ARRAYS:
        raise ValueError(f"{dtype!r} is not a numeric dtype")
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"{shape} is not a shape")
    return np.frombuffer(_bytes(data), dtype=kind).reshape(shape).copy()


def _scalar(value: Any) -> Any:
    array = _array(value)
    if array.shape:
        raise ValueError(f"expected a scalar, got shape {list(array.shape)}")
    return array[()]


def _file(value: Any) -> io.BytesIO:
    data, position = _list(value, 2)
    if type(position) is not int:
        raise TypeError(f"expected a position, got a {type(position).__name__}")
    file = io.BytesIO(_bytes(data))
    file.seek(position)
    return file


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, _string(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no torch.{name}")
    return found


_CODES: dict[type, tuple[str, Callable[[Any], Any]]] = {
    float: ("float", repr),
    bytes: ("bytes", _text),
    bytearray: ("bytearray", _text),
    io.BytesIO: ("BytesIO", lambda v: [_text(v.getvalue()), v.tell()]),
    complex: ("complex", lambda v: [repr(v.real), repr(v.imag)]),
    torch.dtype: ("dtype", lambda v: str(v).removeprefix("torch.")),
    torch.device: ("device", str),
    np.str_: ("numpy string", str),
    TorchVersion: ("torch version", str),
}
VALUES: dict[str, Callable[[Any], Any]] = {
    "float": lambda v: float(_string(v)),
    "bytes": _bytes,
    "bytearray": lambda v: bytearray(_bytes(v)),
    "BytesIO": _file,
    "complex": _complex,
    "dtype": _dtype,
    "device": lambda v: torch.device(_string(v)),
    "array": _array,
    "scalar": _scalar,
    "numpy string": lambda v: np.str_(_string(v)),
    "torch version": lambda v: TorchVersion(_string(v)),
}
"""What makes a value of each kind."""
