"""Plain tensors among DTensors: when they are taken as replicated, and the error otherwise.

The ranks may have different values in a plain tensor of the program, so operators refuse it. Taken
as replicated, without a look at the values, are:

- tensors of one element, which are numbers;
- all plain tensors within `implicit_replication` (state.py), which decompositions also set;
- tensors whose values are not read: those on the meta device, and operands of `is_same_size`;
- in backward, operands of an operator that a built-in autograd node calls: the node got them from
  DTensors, from constants of its formula, and from a gradient that the program passed in full. A
  `torch.autograd.Function` in Python and a hook of a DTensor belong to the program.

Lists of numbers and ranges as an index, as in ``x[[0, 2]]``, become replicated (`index_on`). Plain
tensors that a composite operator creates, such as the causal mask of attention, look like those of
the program, and are refused like them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from dure import torch_private
from dure.errors import UsageError
from dure.mesh import DeviceMesh
from dure.tensor import state
from dure.tensor.call import Op, Place, fill, schema_of
from dure.tensor.placement_types import Replicate
from dure.tensor.spec import TensorMeta, spec_of
from dure.tensor.wrapping import dtensor_type, wrap

__all__ = ["full_numbers", "index_on", "unsharded", "with_replicated", "writes_plain"]

unsharded = WeakTensorKeyDictionary()
"""Unsharded parameters of `fully_shard`, each with a `WeakMethod` that returns its shard."""

_LISTS = frozenset({list, range})
_SAME_SIZE = torch.ops.aten.is_same_size.default
_FIX_PLAIN = (
    "Make it a DTensor: distribute_tensor(t, mesh, placements) if all ranks have the full tensor, "
    "DTensor.from_local if each has its part. If the program did not create it, an operator of "
    "torch did, such as quantile or attention with is_causal=True: then it is the same on all "
    "ranks, so call that operator within dure.tensor.experimental.implicit_replication(), which "
    "takes plain tensors as replicated."
)
_FIX_UNSHARDED = (
    "It is the unsharded parameter of a fully_shard module: a forward with gradients that no "
    "backward has followed left it so. Call reshard() of the module first, or run that forward "
    "under torch.no_grad()."
)


def writes_plain(op: Op, operands: Sequence[Any], places: Sequence[Place]) -> bool:
    """Return whether a plain tensor is written, and each DTensor is a single number.

    This occurs in clipping, which scales plain gradients and DTensors by one factor.
    """
    schema, dtensor = schema_of(op), dtensor_type()
    return any(
        type(t) is not dtensor
        and (schema.names[where] if isinstance(where, int) else where) in schema.mutated
        for t, (where, _) in zip(operands, places, strict=True)
    ) and all(t.ndim == 0 for t in operands if type(t) is dtensor)


def full_numbers(values: Any) -> list[Any]:
    """Return arguments with full plain tensors in the place of DTensors."""
    dtensor = dtensor_type()
    return [v.full_tensor() if type(v) is dtensor else v for v in values]


def with_replicated(
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[Any],
    places: Sequence[Place],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with replicated DTensors in the place of plain tensors.

    Raises:
        UsageError: The program's plain tensor is not one of those listed above.
    """
    dtensor = dtensor_type()
    specs = [t.spec for t in operands if type(t) is dtensor]
    implicit, in_formula = state.implicit_replication.get(), _is_in_formula()
    mutated, names = schema_of(op).mutated, schema_of(op).names
    replaced: list[Any] = []
    for tensor, (where, _) in zip(operands, places, strict=True):
        if type(tensor) is dtensor:
            replaced.append(tensor)
            continue
        name = names[where] if isinstance(where, int) else where
        unread = tensor.is_meta or op is _SAME_SIZE
        constant = (in_formula or unread) and name not in mutated
        constant = constant and (op is _SAME_SIZE or not tensor.requires_grad)
        if tensor.numel() == 1 or implicit or constant:
            replaced.append(_replicated(tensor, specs[0].mesh))
            continue
        raise UsageError(
            f"{op} got a plain tensor together with DTensors",
            op=str(op),
            seen=f"argument {name!r}, {tensor.dtype} {list(tensor.shape)}, together with "
            + ", ".join(map(str, specs)),
            fix=_FIX_UNSHARDED if tensor in unsharded else _FIX_PLAIN,
        )
    filled, named = fill(args, kwargs, places, replaced)
    return tuple(filled), named


def _replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> Any:
    if tensor._is_zerotensor():  # one of torch's formulas, without memory
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return wrap(tensor, spec_of(mesh, (Replicate(),) * mesh.ndim, TensorMeta.of(tensor)))


def _is_in_formula() -> bool:
    """Return whether a built-in autograd node calls the operator, in backward."""
    node: Any = torch_private.current_autograd_node()
    in_program = node is None or isinstance(node, BackwardCFunction) or state.in_hook.get()
    return not in_program


def index_on(mesh: DeviceMesh, index: Any) -> Any:
    """Return an index of a DTensor with replicated tensors in the place of lists of numbers.

    As in torch, a list that contains other entries, such as slices, is an index for each dimension.
    Numbers, None and tensors stay as they are.
    """

    def replicated(numbers: Any) -> Any:
        values = torch.tensor(numbers, device=mesh.device_type)
        return _replicated(values if values.numel() else values.long(), mesh)

    if type(index) in _LISTS and all(type(one) in (int, bool) for one in index):
        return replicated(index)
    if not isinstance(index, (list, tuple)) or _LISTS.isdisjoint(map(type, index)):
        return index
    made = [replicated(one) if _are_numbers(one) else one for one in index]
    return made if isinstance(index, list) else tuple(made)


def _are_numbers(index: Any) -> bool:
    """Return whether an index is a list of numbers, or of such lists."""
    return type(index) in _LISTS and all(
        type(one) in (int, bool) or _are_numbers(one) for one in index
    )
