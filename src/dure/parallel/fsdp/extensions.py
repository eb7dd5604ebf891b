"""Strategy *gathered* for tensor subclasses that say themselves what of them is gathered.

Such a class has two methods, as torch documents them:

    fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        -> (tensors to gather, such as quantized values and scales; metadata)
    fsdp_post_all_gather(outputs, metadata, param_dtype, *, out=None)
        -> (the unsharded tensor, tensors that own its memory); with `out`, it is filled instead

The inputs of a gather may have any dtype, and are sent as bytes in one all_gather per group:

    tensors of this rank  --copy-->  bytes [k]  --all_gather-->  bytes [n, k]  --copy-->  outputs

The outputs stay the same tensors, because unsharded parameters may be views of them; between uses
their storage, and that of the tensors that the class has named, has no bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dure import torch_private
from dure.errors import ModuleError
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.gathered import Gathered
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.reducing import CustomCollective

__all__ = ["Extended", "is_extended"]

_unversioned = torch_private.unsafe_preserve_version_counter


def is_extended(part: torch.Tensor) -> bool:
    """Tell whether a part's class says what of it is gathered.

    Raises:
        ModuleError: It has one of the two methods only.
    """
    has = [hasattr(part, f"fsdp_{when}_all_gather") for when in ("pre", "post")]
    if any(has) and not all(has):
        raise ModuleError(
            "a tensor subclass has both fsdp_pre_all_gather and fsdp_post_all_gather, or neither",
            op="fully_shard",
            seen=type(part).__name__,
        )
    return all(has)


@dataclass(slots=True)
class _Extension:
    """What one parameter's class gathers.

    Attributes:
        metadata: Its own, from this gather's first method to the second.
        shapes, dtypes: Of a full part of each tensor.
        outputs: The gathered tensors, complete along dim 0; the same from the first gather on.
        owned: Tensors that the class has named.
    """

    metadata: Any = None
    shapes: list[torch.Size] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    owned: tuple[torch.Tensor, ...] = ()

    @property
    def rooms(self) -> list[int]:
        """The bytes of a full part of each tensor."""
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return [shape.numel() * dtype.itemsize for shape, dtype in sizes]


class Extended(Gathered):
    """Unshards a group whose parameters are tensor subclasses with extensions.

    Args:
        parameters: Of one dtype, all with extensions.
        axes: Over which they are sharded.
        all_gather: The program's own; None for Dure's.
    """

    def __init__(
        self,
        parameters: Sequence[FSDPParameter],
        axes: DataAxes,
        all_gather: CustomCollective | None = None,
    ) -> None:
        super().__init__(parameters, axes, None, all_gather)
        self._dtype = torch.uint8

    def attach(self) -> None:
        """Start from new shards; new unsharded parameters are made."""
        super().attach()
        self._extensions = [_Extension() for _ in self._parameters]

    def _shards(self) -> torch.Tensor:
        tensors = [
            tensor.detach().contiguous().view(-1).view(torch.uint8)
            for each in zip(self._parameters, self._extensions, strict=True)
            for tensor in self._asked(*each)
        ]
        rooms = [room for extension in self._extensions for room in extension.rooms]
        flat = self._allocate(sum(rooms))
        for tensor, there in zip(tensors, flat.split(rooms), strict=True):
            there[: tensor.numel()].copy_(tensor, non_blocking=self.streams is not None)
        self._note_copies()
        return flat

    def _asked(self, parameter: FSDPParameter, extension: _Extension) -> Sequence[torch.Tensor]:
        """Ask the class what of this rank's part is gathered."""
        part: Any = parameter.part
        pre = part.fsdp_pre_all_gather
        mesh = self._axes.shard_mesh
        strides = torch.empty(parameter.unsharded_shape, device="meta").stride()
        module, policy = parameter.places[0][0], parameter.policy
        all_arguments = (mesh, parameter.unsharded_shape, strides, module, policy)
        only_mesh = len(inspect.signature(pre).parameters) == 1  # torch's older form
        tensors, extension.metadata = pre(*(all_arguments[:1] if only_mesh else all_arguments))
        rows, full = part.shape[0], -(-parameter.unsharded_shape[0] // self._axes.size)
        for tensor in tensors:
            if self._is_uneven(parameter) and tensor.shape[0] not in (rows, full):
                raise ModuleError(
                    "of a parameter that is cut unevenly, as many rows are gathered as it has",
                    op="fsdp_pre_all_gather",
                    parameters=(parameter.name,),
                    seen=f"{list(tensor.shape)}; expected {rows} or, padded, {full} rows",
                )
        extension.dtypes = [t.dtype for t in tensors]
        extension.shapes = [
            torch.Size((full, *t.shape[1:])) if self._is_uneven(parameter) else t.shape
            for t in tensors
        ]
        return tensors

    def _is_uneven(self, parameter: FSDPParameter) -> bool:
        return bool(parameter.unsharded_shape[0] % self._axes.size)

    def _fill(self, pieces: torch.Tensor) -> None:
        """Copy all ranks' bytes [n, k] into the outputs, and make the unsharded parameters."""
        theirs = pieces.split([sum(e.rooms) for e in self._extensions], dim=1)
        for extension, there in zip(self._extensions, theirs, strict=True):
            _copy_out(extension, there)
        self._unsharded = [*map(self._unsharded_tensor, range(len(theirs)), self._extensions)]

    def _unsharded_tensor(self, number: int, extension: _Extension) -> torch.Tensor:
        parameter = self._parameters[number]
        part: Any = parameter.part
        outputs = tuple(extension.outputs)
        if self._is_uneven(parameter):
            outputs = tuple(t[: parameter.unsharded_shape[0]] for t in outputs)
        if not self._unsharded:
            unsharded, owned = part.fsdp_post_all_gather(
                outputs, extension.metadata, parameter.dtype
            )
            extension.owned = tuple(owned)
            return unsharded
        for tensor in extension.owned:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
        parameter.allow_reading()
        unsharded = self._unsharded[number] if parameter.unsharded is None else parameter.unsharded
        with _unversioned((unsharded, *extension.owned)):
            part.fsdp_post_all_gather(outputs, extension.metadata, parameter.dtype, out=unsharded)
        return self._unsharded[number]

    def _memory(self) -> Sequence[torch.Tensor]:
        return [t for e in self._extensions for t in (*e.outputs, *e.owned)]


def _copy_out(extension: _Extension, pieces: torch.Tensor) -> None:
    """Copy all ranks' bytes [n, width] into the outputs."""
    if not extension.outputs:
        rows = [torch.Size((len(pieces) * n, *rest)) for n, *rest in extension.shapes]
        each = zip(rows, extension.dtypes, strict=True)
        extension.outputs = [pieces.new_empty(shape, dtype=dtype) for shape, dtype in each]
    for output, there in zip(extension.outputs, pieces.split(extension.rooms, dim=1), strict=True):
        output.untyped_storage().resize_(there.numel())
        with _unversioned(output):
            output.view(-1).view(torch.uint8).view(there.shape).copy_(there)
