"""The contents of a message: pickled values, and tables of the tensors and references in them.

All messages have one description, `Body`. The values are a pickle (protocol 5) in which tensors and
remote references are numbers of rows: the memory of tensors travels beside the message (`tensors`),
and the receiver must count references before any program code unpickles them (`references`).

`Codec.pack` first looks at the top level. If it has only plain values, and at most one tensor and
one reference, these two are replaced by None and their positions are recorded, so that the standard
pickler suffices; a small tensor is packed by the engine. All other values are pickled with both
tables. Tensors of other kinds (quantized, subclasses) are pickled as torch does it.

Unpickling runs code of the sender's choice. Messages come only from authenticated processes of the
job. With a list of allowed functions (`allow`), the pickle cannot use the objects that it names:
each name, tensor and reference is an inert `_Hole` while it is unpickled. Then the values are
checked to be plain, and the holes are filled.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import msgspec
import torch

from dure import native
from dure.errors import DureError, RpcError
from dure.rpc.allow import Allowed
from dure.rpc.memory import INLINE_BYTES
from dure.rpc.references import RefId, Token
from dure.rpc.tensors import TensorRow, TensorTable, describe_dense, is_dense

__all__ = ["Body", "Codec", "Packed", "ReferenceRow", "insert", "name_of"]

_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
_LEAVES = _PLAIN | {bytearray}

_NONE, _NESTED = -1, -2
"""Instead of a position: there is no such value; all tensors and references are in the pickle."""


class ReferenceRow(msgspec.Struct, array_like=True, frozen=True):
    """A reference of a message."""

    ref: RefId
    owner: int
    token: Token


class Body(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The contents of a message."""

    pickled: bytes = b""  # the values; empty if there is only a tensor or a reference
    tensors: tuple[TensorRow, ...] = ()
    references: tuple[ReferenceRow, ...] = ()
    tensor_at: int = _NONE  # position of the only tensor; `_NESTED`: all are in the pickle
    inline: bytes = b""  # the only tensor, if it is small, as `native.pack_tensor` packed it
    function: str = ""
    """Name of the function that is called with the values (`name_of`). If it has none, the values
    are the function, its arguments and its keyword arguments."""
    reference_at: int = _NONE  # position of the only reference


class Packed(msgspec.Struct, gc=False):
    """A body, and the memory that travels beside it.

    Args:
        body: The body.
        memories: The parts of memory that the tensors cover, contiguous each. They share it with
            the tensors, so the transport copies them.
        sources: The tensors themselves, to attach gradients to.
    """

    body: Body = Body()
    memories: tuple[torch.Tensor, ...] = ()
    sources: tuple[torch.Tensor, ...] = ()


def name_of(function: Any) -> str:
    """Return `module:name` of a function at the top level of its module; "" for all others."""
    if type(function) is not FunctionType:
        return ""
    module_name, name = function.__module__, function.__qualname__
    try:
        known = sys.modules[module_name].__dict__[name]
    except KeyError:
        return ""
    return f"{module_name}:{name}" if known is function else ""


class Codec:
    """Packs and unpacks the values of one process's messages.

    Args:
        reference_type: The type of remote references; its `pack_reference(to)` returns the row.
        take_back: Called with the references that were packed into a message that cannot be sent.
        allowed: The functions that others may call; if None, all.
    """

    def __init__(
        self,
        reference_type: type[Any] | None = None,
        take_back: Callable[[Sequence[ReferenceRow]], None] = lambda _: None,
        allowed: Allowed | None = None,
    ) -> None:
        self._reference_type, self._take_back = reference_type, take_back
        self._allowed = allowed

    def pack(
        self,
        values: tuple[Any, ...],
        to: int = -1,
        function: str = "",
        device_there: Callable[[torch.device], str] | None = None,
    ) -> Packed:
        """Pack values for a process.

        Args:
            values: Any objects that can be pickled, with tensors and references in them.
            to: The receiver.
            function: For the body.
            device_there: Returns the receiver's device for a device of this process.

        Raises:
            RpcError: Something cannot be pickled, or a reference is lost.

        Cost:
            No tensor's memory is copied, except of tensors on other devices and conjugated ones.
        """
        tensor_at = reference_at = _NONE
        inline: bytes | None = None
        for position, value in enumerate(values):
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind is torch.Tensor and tensor_at < 0:
                inline = native.pack_tensor(value, INLINE_BYTES, value.requires_grad)
                if inline is not None or is_dense(value):
                    tensor_at = position
                    continue
            elif kind is self._reference_type and reference_at < 0:
                reference_at = position
                continue
            return self._pack_nested(values, to, function, device_there)
        if tensor_at < 0 and reference_at < 0:
            if not values:
                return Packed(Body(function=function))
            return Packed(Body(pickle.dumps(values, 5), function=function))
        places = tensor_at, reference_at
        others = [None if n in places else value for n, value in enumerate(values)]
        pickled = pickle.dumps(others, 5) if len(others) > 1 else b""
        references = () if reference_at < 0 else (values[reference_at].pack_reference(to),)
        rows, memories, sources = (), (), ()
        if tensor_at >= 0:
            sources = (values[tensor_at],)
            if inline is None:
                rows, memories = (describe_dense(sources[0]),), sources
        body = Body(pickled, rows, references, tensor_at, inline or b"", function, reference_at)
        return Packed(body, memories, sources)

    def load(
        self, body: Body, tensors: Sequence[torch.Tensor], references: Sequence[object] = ()
    ) -> Any:
        """Return the pickled values of a message; `insert` adds the tensor and the reference.

        Args:
            body: Of the message.
            tensors: The tensors of the message (`tensors.rebuild`).
            references: The references of the message, as programs have them.

        Raises:
            RpcError: With a list of allowed functions: the message contains something else.
            pickle.UnpicklingError: The pickle is invalid.
            Exception: Raised by unpickling, for example because a function is unknown here.
        """
        nested = body.tensor_at == _NESTED
        if not body.pickled:
            return ()
        if self._allowed is not None:
            return _load_plain(body.pickled, nested, tensors, references, self._allowed)
        if nested:
            tables = {"_tensor": tensors, "_reference": references}
            return _Unpickler(body.pickled, tables).load()
        return pickle.loads(body.pickled)

    def find_function(self, name: str) -> Any:
        """Return the function of this name (`name_of`).

        Raises:
            RpcError: It may not be called.
            AttributeError: The module does not have it.
            ImportError: There is no such module.
        """
        module_name, _, own_name = name.rpartition(":")
        if self._allowed is not None:
            return self._allowed.function(module_name, own_name)
        module = sys.modules.get(module_name) or importlib.import_module(module_name)
        return getattr(module, own_name)

    def _pack_nested(
        self,
        values: tuple[Any, ...],
        to: int,
        function: str,
        device_there: Callable[[torch.device], str] | None,
    ) -> Packed:
        buffer, table = io.BytesIO(), TensorTable(device_there)
        pickler = _MessagePickler(buffer, to, self._reference_type, table)
        try:
            pickler.dump(values)
        except Exception as error:
            self._take_back(pickler.references)
            if isinstance(error, DureError):  # of a reference
                raise
            raise RpcError(
                "this cannot be sent to another process",
                seen=f"{type(error).__name__}: {error}",
                fix="Functions and classes are sent by name: define them at the top of a module "
                "that the receiver can import; send what objects are made of.",
            ) from error
        rows, memories = table.finish()
        references = tuple(pickler.references)
        body = Body(buffer.getvalue(), rows, references, _NESTED, function=function)
        return Packed(body, memories, tuple(table.sources))


def insert(
    values: Any, body: Body, tensors: Sequence[torch.Tensor], references: Sequence[object]
) -> Sequence[Any]:
    """Return the values of a message, with its only tensor and its only reference.

    Raises:
        TypeError: The values are not a sequence.
        IndexError: The position of the tensor or of the reference is not one of these values.
    """
    if not isinstance(values, tuple | list):
        raise TypeError(f"values of type {type(values).__name__}")
    for at, table in ((body.tensor_at, tensors), (body.reference_at, references)):
        if at >= 0:
            if at > len(values):
                raise IndexError(f"position {at} of {len(values)} values")
            values = (*values[:at], table[0], *values[at + 1 :])
    return values  # pyright: ignore[reportUnknownVariableType]


# --- pickling -------------------------------------------------------------------------------------


def _tensor(number: int) -> torch.Tensor:
    """Represent a tensor in a pickle; unpicklers replace this function."""
    raise pickle.UnpicklingError(f"tensor {number} of a message without tensors")


def _reference(number: int) -> object:
    """Represent a reference."""
    raise pickle.UnpicklingError(f"reference {number} of a message without references")


class _MessagePickler(pickle.Pickler):
    """Replaces tensors and references by the numbers of their rows."""

    def __init__(
        self, file: io.BytesIO, to: int, reference_type: type[Any] | None, table: TensorTable
    ) -> None:
        super().__init__(file, protocol=5)
        self.references: list[ReferenceRow] = []
        self._to, self._reference_type, self._table = to, reference_type, table

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            row = self._table.add(obj)
            return NotImplemented if row is None else (_tensor, (row,))
        if self._reference_type is not None and isinstance(obj, self._reference_type):
            self.references.append(obj.pack_reference(self._to))
            return _reference, (len(self.references) - 1,)
        return NotImplemented


def _row(table: Sequence[Any], number: Any) -> Any:
    try:
        return table[number]
    except (IndexError, TypeError) as error:
        raise pickle.UnpicklingError(f"row {number!r} of a table of {len(table)}") from error


class _Unpickler(pickle.Unpickler):
    """Replaces `_tensor` and `_reference` by functions that return rows of tables."""

    def __init__(self, pickled: bytes, tables: dict[str, Sequence[Any]]) -> None:
        super().__init__(io.BytesIO(pickled))
        # Not methods of this object: a cycle would keep the tensors.
        self._rows = {name: partial(_row, table) for name, table in tables.items()}

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == __name__ and global_name in self._rows:
            return self._rows[global_name]
        return self._find(module_name, global_name)

    def _find(self, module_name: str, global_name: str) -> Any:
        return super().find_class(module_name, global_name)


# --- with a list of allowed functions -------------------------------------------------------------


class _Hole:
    """Represents a tensor, a reference or a named function while a pickle is read.

    A pickle is a program that calls objects and sets their attributes and items. This object cannot
    be called, and has no attributes and no items.
    """

    __slots__ = ()


class _PlainUnpickler(_Unpickler):
    """Reads values with holes instead of objects of this process.

    Attributes:
        held: By the id of each hole: the hole, so that no other object gets its id, and its value.
    """

    def __init__(self, pickled: bytes, tables: dict[str, Sequence[Any]], allowed: Allowed) -> None:
        self.held: dict[int, tuple[_Hole, Any]] = {}
        super().__init__(
            pickled, {name: [*map(self._hole, table)] for name, table in tables.items()}
        )
        self._allowed = allowed

    def _hole(self, value: Any) -> _Hole:
        hole = _Hole()
        self.held[id(hole)] = hole, value
        return hole

    def _find(self, module_name: str, global_name: str) -> Any:
        return self._hole(self._allowed.find(module_name, global_name))


def _load_plain(
    pickled: bytes,
    nested: bool,
    tensors: Sequence[torch.Tensor],
    references: Sequence[object],
    allowed: Allowed,
) -> Any:
    """Unpickle plain values, tensors, references and allowed names.

    Raises:
        RpcError: The pickle has something else, or does something else.
    """
    tables = {"_tensor": tensors, "_reference": references} if nested else {}
    try:
        unpickler = _PlainUnpickler(pickled, tables, allowed)
        return _fill(unpickler.load(), unpickler.held)
    except RpcError:
        raise
    except Exception as error:
        raise _not_plain(f"{type(error).__name__}: {error}") from error


def _fill(value: Any, held: dict[int, tuple[_Hole, Any]]) -> Any:
    """Return a copy of a value, which must be plain, with its holes filled."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is _Hole:
        return held[id(value)][1]
    if kind in (tuple, list, set, frozenset):
        return kind(_fill(each, held) for each in value)
    if kind is not dict:
        raise _not_plain(f"{kind.__module__}.{kind.__qualname__}")
    return {_fill(key, held): _fill(each, held) for key, each in value.items()}


def _not_plain(seen: str) -> RpcError:
    return RpcError(
        "this process accepts only plain values, tensors, references and allowed functions",
        seen=seen,
        fix="Send numbers, texts, bytes, and tuples, lists, sets and dicts of these; or start the "
        "process without init_rpc(allow=[...]).",
    )
