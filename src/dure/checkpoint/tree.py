"""State as JSON and tensors, and back, without pickle: reading a file runs no code of its author.

What `state_dict` returns is a tree of Python values with tensors as leaves. The tensors are taken
out and named by their path (``model/layers.0.weight``); what remains becomes JSON. JSON's own types
stand for themselves; everything else is an object with a kind and a value:

    {"$": "tensor", "v": "optimizer/state/0/exp_avg"}     {"$": "tuple", "v": [...]}
    {"$": "map", "v": [[key, value], ...]}                 dicts whose keys are not plain strings
    {"$": "ordered", "v": [...], "versions": {...}}        a module's state, and its formats

Two leaves that are one tensor (tied weights) get one name, so its bytes are stored once. A type
that is not in the tables below is refused by the path at which it was found.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from dure.errors import UsageError

__all__ = ["decode", "encode"]

TensorOf = Callable[[str], torch.Tensor]


def encode(value: object, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Turn `value` into JSON's types; put the tensors in it into `tensors`, by name.

    Raises:
        UsageError: There is something that cannot be saved; the message names its path.
    """
    return _Encoder(tensors).encode(value, path)


class _Encoder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._name_of: dict[object, str] = {}

    def encode(self, value: object, path: str) -> Any:
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else _tagged("float", repr(value))
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, Mapping):
            return self._mapping(cast(Mapping[object, object], value), path)
        if type(value) in _SEQUENCES:
            items = [self.encode(v, f"{path}/{i}") for i, v in enumerate(_ordered(value))]
            kind = _SEQUENCES[type(value)]
            return items if kind == "list" else _tagged(kind, items)
        return self._leaf(value, path)

    def _leaf(self, value: object, path: str) -> Any:
        match value:
            case bytes() | bytearray():
                return _tagged("bytes", base64.b64encode(value).decode())
            case complex():
                return _tagged("complex", [repr(value.real), repr(value.imag)])
            case torch.dtype():
                return _tagged("dtype", str(value).removeprefix("torch."))
            case torch.device():
                return _tagged("device", str(value))
            case np.ndarray() if value.dtype.kind in "biufc":
                array = np.ascontiguousarray(value)
                data = base64.b64encode(array.tobytes()).decode()
                return _tagged("array", [array.dtype.str, list(value.shape), data])
            case np.generic() if value.dtype.kind in "biufc":
                data = base64.b64encode(value.tobytes()).decode()
                return _tagged("scalar", [value.dtype.str, data])
            case _:
                raise UsageError(
                    "a value cannot be saved in a checkpoint",
                    seen=f"{path} is a {type(value).__module__}.{type(value).__qualname__}",
                    fix="Let state_dict() return tensors, numbers, strings, and lists, tuples, "
                    "sets and dicts of them.",
                )

    def _mapping(self, value: Mapping[object, object], path: str) -> Any:
        kind = _MAPPINGS.get(type(value), "map")
        plain = kind == "map" and all(isinstance(k, str) and k != "$" for k in value)
        if plain:
            return {cast(str, k): self.encode(v, f"{path}/{k}") for k, v in value.items()}
        pairs = [
            [self.encode(k, f"{path}/(key)"), self.encode(v, f"{path}/{k}")]
            for k, v in value.items()
        ]
        tagged = _tagged(kind, pairs)
        versions = getattr(value, "_metadata", None)  # what torch's modules say of their formats
        if kind == "ordered" and isinstance(versions, Mapping):
            plain_dict = dict(cast(Mapping[object, object], versions))
            tagged["versions"] = self.encode(plain_dict, f"{path}/(versions)")
        return tagged

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise UsageError(
                "a tensor cannot be saved in a checkpoint",
                seen=f"{path} is {tensor.layout}, {tensor.dtype}, on {tensor.device}",
                fix="Save dense tensors that have values.",
            )
        tensor = tensor.detach()
        kind = "tensor"
        if tensor.is_complex():  # the file format knows no complex128
            kind, tensor = "complex_tensor", torch.view_as_real(tensor.resolve_conj())
        tensor = tensor.resolve_neg()  # bytes are written as they lie
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        name = self._name_of.get(same) if tensor.numel() else None
        if name is None:
            name = path
            while name in self._tensors:  # "a/b" the key, and "b" within "a"
                name += "'"
            self._name_of[same], self._tensors[name] = name, tensor
        return _tagged(kind, name)


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {"$": kind, "v": value}


_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_MAPPINGS: dict[type, str] = {OrderedDict: "ordered", Counter: "counter"}


def _ordered(value: object) -> list[object]:
    """List a sequence; a set in an order that does not change from run to run."""
    items = list(cast(list[object], value))
    return sorted(items, key=repr) if isinstance(value, set | frozenset) else items


def decode(node: Any, tensor_of: TensorOf) -> Any:
    """Turn what `encode` returned back into values; `tensor_of` gives the tensor of a name.

    Raises:
        KeyError, ValueError, TypeError: The JSON is not what `encode` makes.
    """
    if isinstance(node, list):
        return [decode(item, tensor_of) for item in cast(list[Any], node)]
    if not isinstance(node, dict):
        return node
    fields = cast(dict[str, Any], node)
    if "$" not in fields:
        return {key: decode(item, tensor_of) for key, item in fields.items()}
    kind, value = fields["$"], fields["v"]
    if kind == "tensor":
        return tensor_of(value)
    if kind == "complex_tensor":
        return torch.view_as_complex(tensor_of(value))
    if kind in _WHOLE:
        return _WHOLE[kind](value)
    inner = [decode(item, tensor_of) for item in value]
    made = _FROM_ITEMS[kind](inner)
    if "versions" in fields:
        made._metadata = decode(fields["versions"], tensor_of)
    return made


def _array(value: list[Any]) -> np.ndarray[Any, Any]:
    dtype, shape, data = value
    return np.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no torch.{name}")
    return found


_WHOLE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "complex": lambda v: complex(float(v[0]), float(v[1])),
    "dtype": _dtype,
    "device": torch.device,
    "array": _array,
    "scalar": lambda v: np.frombuffer(base64.b64decode(v[1]), dtype=v[0])[0],
}
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
    "map": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
