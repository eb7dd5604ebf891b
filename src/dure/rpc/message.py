"""What travels in a message: a pickle, and beside it the memory of tensors, and references.

Objects are pickled (protocol 5). Tensors are not: a pickle holds their number in a table, the table
says what of which memory each is, and memory travels by itself, once a message however many tensors
are views of it, and only the part of it that they see. So tensors that share memory at the sender
share it at the receiver. References to remote values are in a table of their own, for the process
that receives the message must know of them before anybody unpacks it (`references`).

Most messages have only plain values, and at most one tensor and one reference, beside each other.
They need no pickler of ours (`pack_plain`): the places of these two among the values are told, and
a small tensor is packed by the engine.

A sparse tensor is its indices and its values, which are checked when it is made; one of the meta
device has no memory. Tensors of other kinds (quantized, subclasses) are pickled in torch's own way;
their parts are tensors again. Tensors of other devices are copied through the host.

Unpickling runs code of the sender's choice. Messages come from authenticated processes of the job
alone; with a list of what may be called (`allow`), nothing else is looked up.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from types import FunctionType
from typing import Any, ClassVar

import msgspec
import torch

from dure import native
from dure.comm.codes import dtype_code, dtype_name
from dure.errors import RpcError
from dure.rpc.memory import INLINE_BYTES
from dure.rpc.references import RefId, Token

__all__ = [
    "Body",
    "Packed",
    "ReferenceRow",
    "TensorRow",
    "find_function",
    "name_of",
    "pack",
    "pack_plain",
    "rebuild",
    "unpack",
]

_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})

_NOWHERE, _PICKLED = -1, -2
"""In place of a tensor's place: there is none; objects of any kind, and tensors, are pickled."""

_PARTS = {
    "sparse_coo": ("_indices", "_values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
"""Of each sparse layout, the methods that return its parts."""

_ALIGNED = 64
"""Where the part of a memory that is sent may begin, in bytes: good for elements of every type."""


class TensorRow(msgspec.Struct, array_like=True, frozen=True):
    """A tensor of a message."""

    memory: int  # its number, if it has one of its own
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, within the memory
    requires_grad: bool = False
    parameter: bool = False
    device: str = "cpu"  # the receiver's
    parts: tuple[int, ...] = ()  # of a sparse one, indices and values: tensors before this one
    coalesced: bool = False
    layout: str = ""  # of a sparse one


class ReferenceRow(msgspec.Struct, array_like=True, frozen=True):
    """A reference of a message."""

    ref: RefId
    owner: int
    token: Token


class Body(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a message is about: values, taken apart."""

    pickled: bytes = b""  # the objects
    tensors: tuple[TensorRow, ...] = ()  # in them
    references: tuple[ReferenceRow, ...] = ()  # in them
    place: int = _NOWHERE  # of the only tensor among plain values
    inline: bytes = b""  # the only tensor, if it is small, as `native.pack_tensor` has packed it
    function: str = ""
    """What is called with the values, by name (`name_of`); if there is none, the values are
    function, arguments and keyword arguments."""
    referred: int = _NOWHERE  # the place of the only reference among plain values


class Packed(msgspec.Struct, gc=False):
    """A body, and what it needs.

    Args:
        body: What is sent.
        memories: The parts of the memory that the tensors see, contiguous each; they share it
            with the tensors, so whoever sends them copies.
        sources: The tensors themselves, for who would attach gradients to them.
        nbytes: How many bytes are sent, without what they are wrapped in.
    """

    body: Body = Body()
    memories: tuple[torch.Tensor, ...] = ()
    sources: tuple[torch.Tensor, ...] = ()
    nbytes: int = 0

    def __post_init__(self) -> None:
        count = len(self.body.pickled) + len(self.body.inline)
        for memory in self.memories:
            count += memory.nbytes
        self.nbytes = count


def name_of(function: Any) -> str:
    """Return `module:name` of a function at the top of its module; of others nothing."""
    if type(function) is not FunctionType:
        return ""
    module_name, name = function.__module__, function.__qualname__
    known = getattr(sys.modules.get(module_name), name, None)
    return f"{module_name}:{name}" if known is function else ""


def find_function(name: str, find: Callable[[str, str], Any] | None = None) -> Any:
    """Return the function of this name (`name_of`).

    Raises:
        AttributeError: The module has none.
        ImportError: There is no such module.
    """
    module_name, _, own_name = name.rpartition(":")
    if find is not None:
        return find(module_name, own_name)
    module = sys.modules.get(module_name) or importlib.import_module(module_name)
    return getattr(module, own_name)


def pack_plain(
    values: tuple[Any, ...], function: str = "", to: int = -1, referring: type[Any] | None = None
) -> Packed | None:
    """Take values apart that are plain, but for one tensor and one reference; None: others are not.

    Args:
        values: The values.
        function: For the body.
        to: Who will receive it.
        referring: The type of references.

    Raises:
        RpcError: The reference is lost.
    """
    place = referred = _NOWHERE
    inline: bytes | None = None
    for number, value in enumerate(values):
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is torch.Tensor and place < 0:
            inline = native.pack_tensor(value, INLINE_BYTES, value.requires_grad)
            if inline is None and not _is_dense(value):
                return None
            place = number
        elif kind is referring and referred < 0:
            referred = number
        else:
            return None
    if place < 0 and referred < 0:
        return Packed(Body(pickle.dumps(values, 5) if values else b"", function=function))
    others = [None if n in (place, referred) else value for n, value in enumerate(values)]
    pickled = pickle.dumps(others, 5) if len(others) > 1 else b""
    rows = () if referred < 0 else (values[referred].pack_reference(to),)
    if place < 0:
        return Packed(Body(pickled, (), rows, function=function, referred=referred))
    tensor: torch.Tensor = values[place]
    if inline is not None:
        return Packed(Body(pickled, (), rows, place, inline, function, referred), (), (tensor,))
    row = TensorRow(
        memory=0,
        dtype=dtype_name(dtype_code(tensor.dtype)),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=0,
        requires_grad=tensor.requires_grad,
    )
    return Packed(Body(pickled, (row,), rows, place, b"", function, referred), (tensor,), (tensor,))


def pack(
    value: object,
    to: int = -1,
    referring: type[Any] | None = None,
    device_there: Callable[[torch.device], str] | None = None,
    function: str = "",
) -> Packed:
    """Take a value apart.

    Args:
        value: Any object that can be pickled, with tensors and references in it.
        to: Who will receive it.
        referring: The type of references.
        device_there: Says on which device of the receiver a tensor of a device of ours belongs;
            without it, only CPU tensors are taken.
        function: For the body.

    Raises:
        RpcError: Something in it cannot be pickled. The error has the `references` that were packed
            before that.

    Cost:
        No tensor's memory is copied, but for tensors of other devices and conjugated ones.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, to, referring, device_there)
    try:
        pickler.dump(value)
    except Exception as error:
        refused = RpcError(
            "this cannot be sent to another process",
            seen=f"{type(error).__name__}: {error}",
            fix="Functions and classes are sent by name: define them at the top of a module that "
            "the receiver can import; send what objects are made of.",
        )
        refused.references = pickler.references  # pyright: ignore[reportAttributeAccessIssue]
        raise refused from error
    return pickler.packed(buffer.getvalue(), function)


def unpack(
    body: Body,
    tensors: Sequence[torch.Tensor],
    references: Sequence[object] = (),
    find: Callable[[str, str], Any] | None = None,
) -> Any:
    """Put a value together.

    Args:
        body: Of the message.
        tensors: Those of the message (`rebuild`).
        references: Those of the message, as programs have them.
        find: Looks up a name of a module; None: as pickle does.

    Raises:
        Exception: What unpickling raises: a function or class is not known here, for example.
    """
    pickled, place = body.pickled, body.place
    if not pickled:
        values = ()
    elif place != _PICKLED:
        values = pickle.loads(pickled) if find is None else _Plain(io.BytesIO(pickled)).load()
    elif find is None:
        values = _Unpickler(io.BytesIO(pickled), tensors, references).load()
    else:
        values = _Careful(io.BytesIO(pickled), tensors, references, find).load()
    if place >= 0:
        values = (*values[:place], tensors[0], *values[place + 1 :])
    if body.referred >= 0:
        values = (*values[: body.referred], references[0], *values[body.referred + 1 :])
    return values


def rebuild(body: Body, memories: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Make the tensors of a message of the memories [bytes] that came with it; they share them.

    Raises:
        ValueError: A tensor does not fit its memory.
        RuntimeError: A sparse tensor has indices outside of its shape, or that are none.
    """
    if body.inline:
        tensor = native.unpack_tensor(body.inline)
        return [tensor.requires_grad_() if body.inline[0] else tensor]
    made: list[torch.Tensor] = []
    for row in body.tensors:
        tensor = _rebuild_sparse(row, made) if row.parts else _rebuild(row, memories)
        if row.parameter:
            made.append(torch.nn.Parameter(tensor, requires_grad=row.requires_grad))
        else:
            made.append(tensor.requires_grad_(row.requires_grad))
    return made


def _rebuild_sparse(row: TensorRow, before: Sequence[torch.Tensor]) -> torch.Tensor:
    values = before[row.parts[-1]]
    # Copies: other tensors of the message may see that memory, and change what was checked.
    indices = [before[number].clone() for number in row.parts[:-1]]
    if len(row.parts) != len(_PARTS.get(row.layout, ())):
        raise ValueError(f"no tensor: {row}")
    if row.layout == "sparse_coo":
        return torch.sparse_coo_tensor(
            indices[0],
            values,
            row.shape,
            device=values.device,
            is_coalesced=row.coalesced,
            check_invariants=True,
        )
    return torch.sparse_compressed_tensor(
        indices[0],
        indices[1],
        values,
        row.shape,
        layout=getattr(torch, row.layout),
        device=values.device,
        check_invariants=True,
    )


def _rebuild(row: TensorRow, memories: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = getattr(torch, row.dtype)
    if not isinstance(dtype, torch.dtype) or len(row.shape) != len(row.stride):
        raise ValueError(f"no tensor: {row}")
    if row.device == "meta":
        return torch.empty_strided(row.shape, row.stride, dtype=dtype, device="meta")
    memory = memories[row.memory]
    last = row.offset + sum(s * (n - 1) for n, s in zip(row.shape, row.stride, strict=True))
    inside = min((row.offset, *row.shape, *row.stride)) >= 0
    if not inside or (0 not in row.shape and (last + 1) * dtype.itemsize > memory.nbytes):
        raise ValueError(f"a tensor that is larger than its memory: {row}")
    storage, begin = memory.untyped_storage(), int(memory.storage_offset()) * memory.itemsize
    offset = begin // dtype.itemsize + row.offset
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    tensor.set_(storage, offset, row.shape, row.stride)  # pyright: ignore[reportCallIssue]
    return tensor if row.device == "cpu" else tensor.to(row.device)


def _tensor(number: int) -> torch.Tensor:
    """Stands for a tensor in a pickle; whoever reads it puts another function in its place."""
    raise pickle.UnpicklingError(f"tensor {number} of a message that is read without its tensors")


def _reference(number: int) -> object:
    """Stands for a reference."""
    raise pickle.UnpicklingError(f"reference {number} of a message that is read without them")


class _Pickler(pickle.Pickler):
    """Takes tensors and references out."""

    def __init__(
        self,
        file: io.BytesIO,
        to: int,
        referring: type[Any] | None,
        device_there: Callable[[torch.device], str] | None,
    ) -> None:
        super().__init__(file, protocol=5)
        self.references: list[ReferenceRow] = []
        self._rows: list[TensorRow] = []
        self._sources: list[torch.Tensor] = []
        self._to, self._referring, self._device_there = to, referring, device_there
        self._numbers: dict[int, int] = {}  # of memories, by their storages
        self._storages: list[torch.UntypedStorage] = []
        self._seen: list[tuple[int, int]] = []  # of each, the first byte and the end

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            if type(obj) not in (torch.Tensor, torch.nn.Parameter):
                return NotImplemented
            layout = str(obj.layout).removeprefix("torch.")
            if layout in _PARTS:
                self._add_sparse(obj, layout)
            elif _is_plain(obj):
                self._add(obj)
            else:
                return NotImplemented
            return _tensor, (len(self._rows) - 1,)
        if self._referring is not None and isinstance(obj, self._referring):
            self.references.append(obj.pack_reference(self._to))
            return _reference, (len(self.references) - 1,)
        return NotImplemented

    def _add(self, tensor: torch.Tensor) -> None:
        device = tensor.device.type
        plain = tensor.detach()
        if device == "meta":
            self._append(tensor, plain, -1, device)
            return
        if device != "cpu":
            if self._device_there is None:
                raise ValueError(f"a tensor on {tensor.device}, for which there is no device map")
            device, plain = self._device_there(tensor.device), plain.cpu()
        plain = plain.resolve_conj().resolve_neg()
        storage, size = plain.untyped_storage(), plain.itemsize
        identity = storage._cdata  # pyright: ignore[reportPrivateUsage]: what tells storages apart
        number = self._numbers.setdefault(identity, len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
            self._seen.append((storage.nbytes(), 0))
        if plain.numel():
            first = int(plain.storage_offset())
            spread = zip(plain.shape, plain.stride(), strict=True)
            last = first + sum(s * (n - 1) for n, s in spread)
            begin, end = self._seen[number]
            self._seen[number] = min(begin, first * size), max(end, (last + 1) * size)
        self._append(tensor, plain, number, device)

    def _append(self, tensor: torch.Tensor, plain: torch.Tensor, memory: int, device: str) -> None:
        row = TensorRow(
            memory=memory,
            dtype=dtype_name(dtype_code(plain.dtype)),
            shape=tuple(plain.shape),
            stride=plain.stride(),
            offset=int(plain.storage_offset()),
            requires_grad=tensor.requires_grad,
            parameter=isinstance(tensor, torch.nn.Parameter),
            device=device,
        )
        self._rows.append(row)
        self._sources.append(tensor)

    def _add_sparse(self, tensor: torch.Tensor, layout: str) -> None:
        plain = tensor.detach()
        rows = self._rows
        parts = [getattr(plain, name)() for name in _PARTS[layout]]
        for part in parts:
            self._add(part)
        row = TensorRow(
            memory=-1,
            dtype=rows[-1].dtype,
            shape=tuple(plain.shape),
            stride=(),
            offset=0,
            requires_grad=tensor.requires_grad,
            parameter=isinstance(tensor, torch.nn.Parameter),
            device=rows[-1].device,
            parts=tuple(range(len(rows) - len(parts), len(rows))),
            coalesced=layout == "sparse_coo" and plain.is_coalesced(),
            layout=layout,
        )
        rows.append(row)
        self._sources.append(tensor)

    def packed(self, pickled: bytes, function: str) -> Packed:
        """Return all of it, but for what no tensor sees of its memory."""
        begins: list[int] = []
        memories: list[torch.Tensor] = []
        for storage, (first, end) in zip(self._storages, self._seen, strict=True):
            begin = min(first, end) // _ALIGNED * _ALIGNED
            begins.append(begin)
            seen = torch.empty(0, dtype=torch.uint8, device="cpu")
            seen.set_(storage, begin, (end - begin,))  # pyright: ignore[reportCallIssue]
            memories.append(seen)
        rows = self._rows
        for number, row in enumerate(rows):
            if row.memory < 0:
                continue
            before = begins[row.memory] // getattr(torch, row.dtype).itemsize
            offset = row.offset - before if 0 not in row.shape else 0
            rows[number] = msgspec.structs.replace(row, offset=offset)
        body = Body(pickled, tuple(rows), tuple(self.references), _PICKLED, function=function)
        return Packed(body, tuple(memories), tuple(self._sources))


_MAKER = ("dure.rpc.remote_module", "_again")
"""The one function that pickles call beside those that put tensors and references in."""

_OLD = (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4)
"""Instructions that call, or find, by ways of their own; nothing is pickled with them."""


class _Plain(pickle.Unpickler):
    """Of plain values, which name nothing."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain value")


class _PutsIn:
    """Of unpicklers: puts tensors and references in."""

    def __init__(
        self, file: io.BytesIO, tensors: Sequence[torch.Tensor], references: Sequence[object]
    ) -> None:
        super().__init__(file)  # pyright: ignore[reportCallIssue]
        self._own = {"_tensor": tensors.__getitem__, "_reference": references.__getitem__}

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == __name__ and global_name in self._own:
            return self._own[global_name]
        # A bound method of this, kept in it, would be a cycle, and keep the tensors.
        return super().find_class(module_name, global_name)  # pyright: ignore


class _Unpickler(_PutsIn, pickle.Unpickler):
    """The one of C."""


class _Careful(_PutsIn, pickle._Unpickler):  # pyright: ignore
    """The one of Python, which makes new values, and changes nothing that was there before.

    A pickle is a program: it may call what it names, and set attributes and items of what that
    returns. Here it calls classes, and what puts tensors, references and remote modules in. An
    allowed function is called as the function of a message only, so what it returns is never in the
    pickle's hands; named in a pickle it is an argument. Classes, functions, tensors, references and
    members of enums are as they are found.
    """

    dispatch: ClassVar[Any] = {**pickle._Unpickler.dispatch}  # pyright: ignore

    def __init__(
        self,
        file: io.BytesIO,
        tensors: Sequence[torch.Tensor],
        references: Sequence[object],
        find: Callable[[str, str], Any],
    ) -> None:
        super().__init__(file, tensors, references)
        self._find, self._makers = find, list(self._own.values())

    def find_class(self, module: str, name: str) -> Any:  # pyright: ignore
        if module == __name__ and name in self._own:
            return self._own[name]
        found = self._find(module, name)
        if (module, name) == _MAKER:
            self._makers.append(found)
        return found

    def load_reduce(self) -> None:
        called = self.stack[-2]  # pyright: ignore
        if not any(called is maker for maker in self._makers):
            _check_class(called)
        super().load_reduce()  # pyright: ignore

    def load_others(self) -> None:
        raise pickle.UnpicklingError("an instruction that pickles of protocol 5 do not have")

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch |= dict.fromkeys((code[0] for code in _OLD), load_others)


def _checked(check: Callable[[Any], None], load: Any, target: Callable[[Any], Any]) -> Any:
    """Return an instruction of the unpickler's, `load`, before which its target is looked at."""

    def checked(unpickler: Any) -> None:
        check(target(unpickler))
        load(unpickler)

    return checked


def _check_class(called: object) -> None:
    """Refuse what a pickle would call, if that is no class."""
    if not isinstance(called, type):
        raise pickle.UnpicklingError(f"{called!r} is not to be called by a pickle")


def _check_new(target: object) -> None:
    """Refuse what a pickle would change, if it was there before, or has been checked."""
    if isinstance(target, type | FunctionType | Enum | torch.Tensor) or hasattr(
        target, "pack_reference"
    ):
        raise pickle.UnpicklingError(f"attributes and items of {target!r} are not to be set")


def _second(unpickler: Any) -> Any:
    return unpickler.stack[-2]


def _third(unpickler: Any) -> Any:
    return unpickler.stack[-3]


def _below_mark(unpickler: Any) -> Any:
    return unpickler.metastack[-1][-1]


for _code, _check, _target in (
    (pickle.NEWOBJ, _check_class, _second),
    (pickle.NEWOBJ_EX, _check_class, _third),
    (pickle.BUILD, _check_new, _second),
    (pickle.APPEND, _check_new, _second),
    (pickle.SETITEM, _check_new, _third),
    (pickle.APPENDS, _check_new, _below_mark),
    (pickle.SETITEMS, _check_new, _below_mark),
    (pickle.ADDITEMS, _check_new, _below_mark),
):
    _Careful.dispatch[_code[0]] = _checked(_check, _Careful.dispatch[_code[0]], _target)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory of this host in the order of its elements, and nothing else."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory with a shape and strides, and nothing else."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
