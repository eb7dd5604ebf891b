"""Operators on lists of tensors, which optimizers call: `_foreach_*`, `_fused_*`, gradient scaling.

They compute element by element. If the tensors at each position of the lists have the same
placements, and none is Partial, the operator runs once on the lists of parts. Otherwise the tensors
are processed one by one, for which torch has a form of each operator. The tensors of a list may be
on several meshes, or plain.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dure import torch_private
from dure.comm.ops import ReduceOp
from dure.errors import NotInGroupError, PlacementError
from dure.mesh import DeviceMesh
from dure.tensor.call import Op, R, schema_of
from dure.tensor.dispatch import check_copy, special
from dure.tensor.dtensor import DTensor
from dure.tensor.redistribute import redistribute
from dure.tensor.registry import is_alias, may_overlap
from dure.tensor.spec import DTensorSpec, TensorMeta, spec_of
from dure.tensor.strides import with_equal_strides, write_back
from dure.tensor.wrapping import parts_of, wrap

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = [
    "Norms",
    "are_parts",
    "combine",
    "norm_of_norms",
    "norms_by_mesh",
    "norms_of",
    "number",
    "parts_like",
]

aten = torch.ops.aten
Specs = list[DTensorSpec | None]


def _overloads(*prefixes: str) -> list[Op]:
    """Return the operators whose names have a prefix, without those that write into `out`."""
    found: list[Op] = []
    for name in torch_private.dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        if base.startswith(prefixes) and not overload.endswith("out"):
            found.append(getattr(getattr(aten, base), overload or "default"))
    return found


_FUSED = _overloads("_fused_adam", "_fused_sgd_", "_fused_adagrad_")
_NOT_ELEMENTWISE = ("_foreach_mm", "_foreach_norm", "_foreach_powsum", "_foreach_max.default")
_EACH = torch_private.DispatchKey.CompositeExplicitAutograd
"""The dispatch key of torch's form of an operator on lists that processes tensors one by one."""


def are_parts(specs: Collection[DTensorSpec | None]) -> bool:
    """Return whether no tensor is Partial; None represents plain tensors."""
    return not any(s is not None and s.partial for s in specs)


def parts_like(given: Sequence[Any], specs: Specs) -> list[Any] | None:
    """Return the parts of tensors that have the placements of `specs`; None if one has others.

    A spec of None requires a plain tensor. Numbers, such as counts of steps, may be plain tensors
    in any position, or DTensors replicated on any mesh that contains this rank.
    """
    if len(given) not in (0, len(specs)):
        return None
    found = parts_of(given, specs) if given else []
    if found is not None:
        return found
    accepted: Specs = []
    for tensor, spec in zip(given, specs, strict=True):
        if type(tensor) is DTensor:
            own = tensor.spec
            fits = (spec is not None and _same_elements(own, spec)) or _is_number(own)
            accepted.append(own if fits else None)
        elif tensor is None or tensor.ndim == 0 or spec is None:
            accepted.append(None)
        else:
            return None
    return parts_of(given, accepted)


def _is_number(spec: DTensorSpec) -> bool:
    """Return whether a tensor has no dimensions and its value is on this rank."""
    return spec.ndim == 0 and not spec.partial and spec.coordinate is not None


def _same_elements(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Return whether the parts have the same elements of the full tensors."""
    same = one is other or (one.mesh is other.mesh and one.placements == other.placements)
    return same and one.shape == other.shape


@special(*_overloads("_foreach_"), *_FUSED, lists=True)
def _on_parts(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    filled, named = list(args), dict(kwargs)
    lists = {n: a for n, a in (*enumerate(args), *kwargs.items()) if _is_list(a)}
    specs: Specs = [t.spec if type(t) is DTensor else None for t in next(iter(lists.values()))]
    elementwise = not str(op).removeprefix("aten.").startswith(_NOT_ELEMENTWISE)
    distinct = {*specs}
    on_parts = elementwise and are_parts(distinct)
    for where, arg in (*enumerate(args), *kwargs.items()):
        holder: Any = filled if isinstance(where, int) else named
        if where in lists:
            holder[where] = parts_like(arg, specs) if on_parts else None
            on_parts = holder[where] is not None
        elif type(arg) is DTensor:
            _check_number(op, arg.spec, specs)
            holder[where] = number(arg)
    mutated, names = schema_of(op).mutated, schema_of(op).names
    if on_parts and mutated and op not in _FUSED:
        given: list[Any] = [
            filled[where] if isinstance(where, int) else named[where] for where in lists
        ]
        on_parts = not _overlap(distinct, given)
    if not on_parts and op in _FUSED:
        raise PlacementError(
            f"{op} needs lists whose tensors have the same placements, none of them Partial",
            op=str(op),
            seen=f"the first list has {', '.join(map(str, specs))}",
            fix="Redistribute the tensors of the other lists to the placements of the first list.",
        )
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    if op in _FUSED:
        holders: list[Any] = [filled if isinstance(where, int) else named for where in lists]
        given = [holder[where] for holder, where in zip(holders, lists, strict=True)]
        stored, copies = with_equal_strides(given)
        for holder, where, parts in zip(holders, lists, stored, strict=True):
            holder[where] = parts
    results = op(*filled, **named) if on_parts else op._op_dk(_EACH, *args, **kwargs)  # pyright: ignore
    write_back(copies)
    for where, tensors in lists.items():
        if (names[where] if isinstance(where, int) else where) in mutated:
            torch.autograd.graph.increment_version(tensors)
    if results is None or mutated or not on_parts:
        return results
    if not isinstance(results[0], torch.Tensor):
        return tuple(_wrapped(one, specs) for one in results)
    return _wrapped(results, specs)


def _overlap(specs: set[DTensorSpec | None], lists: Sequence[Sequence[Any]]) -> bool:
    """Return whether parts share memory, for which torch may raise; one by one they are copied."""
    if len(lists) < 2 or not any(map(may_overlap, specs - {None})):
        return False
    return any(any(map(is_alias, lists[0], each)) for each in lists[1:])


def _is_list(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], torch.Tensor)


def _wrapped(parts: Sequence[torch.Tensor], specs: Specs) -> list[Any]:
    made: list[Any] = []
    for part, spec in zip(parts, specs, strict=True):
        if spec is not None and part.dtype != spec.meta.dtype:
            spec = spec.with_dtype(part.dtype)  # noqa: PLW2901
        made.append(part if spec is None else wrap(part, spec))
    return made


def number(tensor: Any) -> Any:
    """Return the value of a DTensor as a plain tensor; return other values unchanged."""
    if type(tensor) is not DTensor:
        return tensor
    return redistribute(tensor.part, tensor.spec, tensor.spec.replicated())


def _check_number(op: Op, spec: DTensorSpec, specs: Specs) -> None:
    """Raise if a number is on a mesh without this rank, and tensors are on a mesh with it."""
    if spec.coordinate is None and any(s is None or s.coordinate is not None for s in specs):
        raise NotInGroupError(
            f"{op} got a number on a mesh that does not contain this rank",
            op=str(op),
            rank=spec.mesh.get_rank(),
            seen=str(spec),
            fix="Put the number on a mesh with all ranks that have the tensors.",
        )


# ---- scaling of gradients ------------------------------------------------------------------------


@special(aten._amp_foreach_non_finite_check_and_unscale_.default, lists=True)
def _unscale(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale the parts; if one rank finds an inf or NaN, all ranks of its mesh report it."""
    grads, found, inverse = args
    specs = [t.spec for t in grads if type(t) is DTensor]
    terms = next((s for s in specs if s.partial), None)
    if terms is not None:
        raise PlacementError(
            f"{op} cannot unscale a Partial gradient",
            op=str(op),
            seen=str(terms),
            fix="Redistribute the gradient to Replicate() or Shard() first.",
        )
    flag = number(found)
    op([t.part if type(t) is DTensor else t for t in grads], flag, number(inverse), **kwargs)
    for mesh, axes in dict.fromkeys(_cut_axes(spec) for spec in specs):
        for axis in axes:
            mesh.get_group(axis).all_reduce(flag, ReduceOp.MAX)


# ---- norms ---------------------------------------------------------------------------------------
#
# The sum of p-th powers leaves the range of float32 long before the norm does: squares of 2e19
# overflow, and those of 1e-23 vanish. So
#
# 1. the norm of each part is computed in float32, or in float64 if the part is float64. If the
#    powers did not fit, it is computed again after dividing the part by its largest element;
# 2. norms are divided by the largest of them and combined in float64 (`norm_of_norms`), also the
#    norms that the ranks of a mesh gather from each other (`combine`).

_LEAST_SUM = 2.0**-96
"""Smaller sums of p-th powers in float32 may have lost digits of small elements."""


def combine(norms: torch.Tensor, p: float, group: ProcessGroup) -> torch.Tensor:
    """Return the p-norm over a group's ranks of each of their norms, float64 [k].

    Collective:
        All ranks of the group, with the same k.

    Cost:
        One all_gather of 8 k bytes per rank.
    """
    gathered = norms.new_empty(group.size(), *norms.shape)
    group.all_gather_single(gathered, norms)
    return norm_of_norms(gathered, p)


def norm_of_norms(norms: torch.Tensor, p: float) -> torch.Tensor:
    """Return the p-norm over dim 0 of norms, float64 [n, ...]; for p = 0 the sum of counts."""
    if p == 0:
        return norms.sum(0)
    if math.isinf(p) or not len(norms):
        return torch.linalg.vector_norm(norms, p, dim=0)
    scale = _divisor(norms.amax(0) if p > 0 else norms.amin(0))
    return torch.linalg.vector_norm(norms / scale, p, dim=0) * scale


def _divisor(largest: torch.Tensor) -> torch.Tensor:
    """Return divisors: the numbers, with 1 in place of 0, inf and NaN."""
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


def _norms_of_parts(parts: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """Return the p-norm of each part, float64 [k], all on one device."""
    device = parts[0].device
    if p == 0:
        return torch.stack([torch.count_nonzero(part) for part in parts]).double()
    neutral = torch.full((1,), math.inf if p < 0 else 0.0, device=device)
    parts = [part if part.numel() else neutral for part in parts]
    if device.type != "cpu" and not math.isinf(p):  # reading a norm would make the host wait
        return torch.stack([_scaled_norm(part, p) for part in parts]).double()
    found = _direct_norms(parts, p)
    if math.isinf(p):
        return found
    sums = found**p
    lost = ~((sums >= _LEAST_SUM) & sums.isfinite() | found.isnan())
    numbers: list[int] = lost.nonzero().flatten().tolist()
    if numbers:
        scales = _direct_norms([parts[n] for n in numbers], math.inf if p > 0 else -math.inf)
        for number, scale in zip(numbers, scales.tolist(), strict=True):
            if 0 < scale < math.inf:  # otherwise it is the norm of zeros, or of infinities
                found[number] = _scaled_norm(parts[number], p)
    return found


_NARROW = (torch.float16, torch.bfloat16)
"""Dtypes whose norms are computed in float32."""


def _direct_norms(parts: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """Return norms by sums of powers, float64 [k], computed by one call for all parts."""
    found = torch.empty(len(parts), dtype=torch.float64, device=parts[0].device)
    for is_narrow in (False, True):
        numbers = [n for n, part in enumerate(parts) if (part.dtype in _NARROW) is is_narrow]
        if numbers:
            some, dtype = [parts[n] for n in numbers], torch.float32 if is_narrow else None
            found[numbers] = torch.stack(torch_private.foreach_norm(some, p, dtype)).double()
    return found


def _scaled_norm(part: torch.Tensor, p: float) -> torch.Tensor:
    """Return the p-norm [] of a part, which is divided by its largest element first."""
    part = part.float() if part.dtype in _NARROW else part
    scale = _divisor(torch.linalg.vector_norm(part, math.inf if p > 0 else -math.inf))
    return torch.linalg.vector_norm(part / scale, p).double() * scale


def _divided(spec: DTensorSpec) -> tuple[DeviceMesh, tuple[int, ...], bool]:
    """Return the mesh, the axes that divide the tensor, and whether this rank has a part."""
    return *_cut_axes(spec), spec.coordinate is not None


def _cut_axes(spec: DTensorSpec) -> tuple[DeviceMesh, tuple[int, ...]]:
    """Return the mesh and the axes along which ranks have different parts."""
    axes = tuple(axis for axis, p in enumerate(spec.placements) if p.is_shard())
    return spec.mesh, axes if spec.coordinate is not None else ()


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of tensors that are cut along the same axes of one mesh.

    Attributes:
        numbers: The positions of the tensors in the list.
        parts: This rank's parts of the tensors.
        mesh: The mesh of the tensors; None for plain tensors.
        values: The norm of each tensor, float64 [k]; the same on all ranks of the mesh.
        is_inside: Whether this rank is in the mesh; otherwise it has no elements and norms are 0.
    """

    numbers: list[int]
    parts: list[torch.Tensor]
    mesh: DeviceMesh | None
    values: torch.Tensor
    is_inside: bool


def norms_by_mesh(tensors: Sequence[torch.Tensor], p: float, in_total: bool) -> list[Norms]:
    """Return norms, grouped by the axes that cut the tensors.

    Args:
        tensors: DTensors on any meshes, and plain tensors, which are the same on all ranks.
        p: The p of the norm.
        in_total: Combine the norms of each group, so that `values` is [1].

    Collective:
        All ranks of the meshes.

    Cost:
        For each group one all_gather along each axis that cuts its tensors, of 8 bytes for each
        tensor, or of 8 bytes if `in_total`.
    """
    groups: dict[Any, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    members_of: dict[Any, list[tuple[int, torch.Tensor]]] = {}  # the groups, by spec and device
    for number, tensor in enumerate(tensors):
        spec, part = None, tensor
        if type(tensor) is DTensor:
            check_copy("norm", tensor)
            spec, part = tensor.spec, tensor.part
            if spec.partial:
                part = redistribute(part, spec, spec.without_partial())
        members = members_of.get((spec, part.device))
        if members is None:
            key = (None, (), True) if spec is None else _divided(spec.without_partial())
            members = members_of[spec, part.device] = groups[key, part.device]
        members.append((number, part))
    found: list[Norms] = []
    for ((mesh, axes, inside), _), members in groups.items():
        numbers, parts = map(list, zip(*members, strict=True))
        values = _norms_of_parts(parts, p)
        values = norm_of_norms(values, p).reshape(1) if in_total else values
        for axis in axes:
            values = combine(values, p, mesh.get_group(axis))
        found.append(Norms(numbers, parts, mesh, values, inside))
    return found


def norms_of(
    tensors: Sequence[torch.Tensor], p: float, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the p-norm of each tensor: replicated DTensors, and plain tensors for plain tensors.

    Cost:
        That of `norms_by_mesh`.
    """
    found: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(tensors)
    for norms in norms_by_mesh(tensors, p, in_total=False):
        mesh = norms.mesh
        kinds = [dtype or part.dtype for part in norms.parts]
        for kind in set(kinds):
            rounded = norms.values.to(kind.to_real()).unbind()
            spec = mesh and spec_of(mesh, (R,) * mesh.ndim, TensorMeta.of(rounded[0]))
            for number, own, norm in zip(norms.numbers, kinds, rounded, strict=True):
                if own is kind:
                    found[number] = norm if spec is None else wrap(norm, spec)
    return found


@special(aten._foreach_norm.Scalar, lists=True)
def _foreach_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    names = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    return norms_of(names["self"], float(names.get("ord", 2)), names.get("dtype"))
