"""Operators on lists of tensors, which optimizers call: `_foreach_*`, `_fused_*`, gradient scaling.

They compute element by element, so they run on the parts, once for a whole list, where the tensors
of each place lie alike; nothing else is looked up for each tensor. Other lists, also those with
terms of a sum, are gone through tensor by tensor: torch has such a form of each. The tensors of a
list may be of several meshes, and plain ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

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
    """Return the operators whose name begins so, without those that write into `out`."""
    found: list[Op] = []
    for name in torch._C._dispatch_get_all_op_names():  # pyright: ignore
        base, _, overload = name.removeprefix("aten::").partition(".")
        if base.startswith(prefixes) and not overload.endswith("out"):
            found.append(getattr(getattr(aten, base), overload or "default"))
    return found


_FUSED = _overloads("_fused_adam", "_fused_sgd_", "_fused_adagrad_")
_NOT_ELEMENTWISE = ("_foreach_mm", "_foreach_norm", "_foreach_powsum", "_foreach_max.default")
_EACH = torch._C.DispatchKey.CompositeExplicitAutograd  # pyright: ignore
"""Where torch keeps the form of an operator on lists that goes through them."""


def are_parts(specs: Collection[DTensorSpec | None]) -> bool:
    """Return whether ranks have parts of such tensors, and no terms; plain ones are fine."""
    return not any(s is not None and s.partial for s in specs)


def parts_like(given: Sequence[Any], specs: Specs) -> list[Any] | None:
    """Return the parts of tensors that lie as `specs` say; None if one does not.

    Plain tensors stand for plain ones, or are numbers, such as counts of steps. Numbers may also be
    DTensors, replicated on any mesh that has this rank.
    """
    if len(given) not in (0, len(specs)):
        return None
    found = parts_of(given, specs) if given else []
    if found is not None:
        return found
    lie: Specs = []
    for tensor, spec in zip(given, specs, strict=True):
        if type(tensor) is DTensor:
            own = tensor.spec
            alike = spec is not None and _alike(own, spec)
            lie.append(own if alike or _is_number(own) else None)
        elif tensor is None or tensor.ndim == 0 or spec is None:
            lie.append(None)
        else:
            return None
    return parts_of(given, lie)


def _is_number(spec: DTensorSpec) -> bool:
    """Return whether this rank has all of a tensor without dimensions."""
    return spec.ndim == 0 and not spec.partial and spec.coordinate is not None


def _alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Return whether the parts have the same elements of the whole."""
    same = one is other or (one.mesh is other.mesh and one.placements == other.placements)
    return same and one.shape == other.shape


@special(*_overloads("_foreach_"), *_FUSED, lists=True)
def _on_parts(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    filled, named = list(args), dict(kwargs)
    lists = {n: a for n, a in (*enumerate(args), *kwargs.items()) if _is_list(a)}
    specs: Specs = [t.spec if type(t) is DTensor else None for t in next(iter(lists.values()))]
    elementwise = not str(op).removeprefix("aten.").startswith(_NOT_ELEMENTWISE)
    distinct = {*specs}
    alike = elementwise and are_parts(distinct)
    for where, arg in (*enumerate(args), *kwargs.items()):
        holder: Any = filled if isinstance(where, int) else named
        if where in lists:
            holder[where] = parts_like(arg, specs) if alike else None
            alike = holder[where] is not None
        elif type(arg) is DTensor:
            _check_number(op, arg.spec, specs)
            holder[where] = number(arg)
    mutated, names = schema_of(op).mutated, schema_of(op).names
    if alike and mutated and op not in _FUSED:
        given: list[Any] = [
            filled[where] if isinstance(where, int) else named[where] for where in lists
        ]
        alike = not _overlap(distinct, given)
    if not alike and op in _FUSED:
        raise PlacementError(
            f"{op} is given lists whose tensors lie differently, or terms of a reduction",
            op=str(op),
            seen=f"the first list has {', '.join(map(str, specs))}",
            fix="Redistribute them as the first list's.",
        )
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    if op in _FUSED:
        holders: list[Any] = [filled if isinstance(where, int) else named for where in lists]
        given = [holder[where] for holder, where in zip(holders, lists, strict=True)]
        stored, copies = with_equal_strides(given)
        for holder, where, parts in zip(holders, lists, stored, strict=True):
            holder[where] = parts
    results = op(*filled, **named) if alike else op._op_dk(_EACH, *args, **kwargs)  # pyright: ignore
    write_back(copies)
    for where, tensors in lists.items():
        if (names[where] if isinstance(where, int) else where) in mutated:
            torch.autograd.graph.increment_version(tensors)
    if results is None or mutated or not alike:
        return results
    if not isinstance(results[0], torch.Tensor):
        return tuple(_wrapped(one, specs) for one in results)
    return _wrapped(results, specs)


def _overlap(specs: set[DTensorSpec | None], lists: Sequence[Sequence[Any]]) -> bool:
    """Return whether torch may refuse parts that share memory; one by one they are copied first."""
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
    """Return the plain number that a DTensor is; everything else as it is."""
    if type(tensor) is not DTensor:
        return tensor
    return redistribute(tensor.part, tensor.spec, tensor.spec.replicated())


def _check_number(op: Op, spec: DTensorSpec, specs: Specs) -> None:
    """Refuse a number that this rank does not have for tensors that it has."""
    if spec.coordinate is None and any(s is None or s.coordinate is not None for s in specs):
        raise NotInGroupError(
            f"{op} is given a number on a mesh that does not have this rank",
            op=str(op),
            rank=spec.mesh.get_rank(),
            seen=str(spec),
            fix="Put the number on a mesh with all ranks that have the tensors.",
        )


# ---- scaling of gradients ------------------------------------------------------------------------


@special(aten._amp_foreach_non_finite_check_and_unscale_.default, lists=True)
def _unscale(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale the parts; what one rank found, all ranks of its mesh have found."""
    grads, found, inverse = args
    specs = [t.spec for t in grads if type(t) is DTensor]
    terms = next((s for s in specs if s.partial), None)
    if terms is not None:
        raise PlacementError(
            f"{op} would look at terms of a reduction",
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
#    powers did not fit, it is computed again, of the part divided by its largest element;
# 2. norms are combined in float64 and divided by the largest of them first (`norm_of_norms`),
#    also those that the ranks of a mesh have gathered from each other (`combine`).

_LEAST_SUM = 2.0**-96
"""Sums of p-th powers in float32 that are smaller have lost digits of small elements."""


def combine(norms: torch.Tensor, p: float, group: ProcessGroup) -> torch.Tensor:
    """Return the p-norm over a group's ranks of each of their norms, float64 [k].

    Collective: all ranks of the group, with the same k.
    Cost: one all_gather of 8 k bytes per rank.
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
    """Return numbers as divisors: 1 in place of 0, inf and NaN."""
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


def _norms_of_parts(parts: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """Return the p-norm of each part, float64 [k], all on one device."""
    if p == 0:
        return torch.stack([torch.count_nonzero(part) for part in parts]).double()
    if parts[0].device.type != "cpu" and not math.isinf(p):  # reading it would make the host wait
        return torch.stack([_norm_of_part(part, p, is_scaled=True) for part in parts]).double()
    found = torch.stack([_norm_of_part(part, p) for part in parts]).double()
    if math.isinf(p):
        return found
    sums = found**p
    lost = ~((sums >= _LEAST_SUM) & sums.isfinite() | found.isnan())
    if lost.any():
        for number in lost.nonzero().flatten().tolist():
            found[number] = _norm_of_part(parts[number], p, is_scaled=True)
    return found


def _norm_of_part(part: torch.Tensor, p: float, is_scaled: bool = False) -> torch.Tensor:
    """Return the p-norm [] of a part, of what is divided by its largest element if `is_scaled`."""
    if not part.numel():
        empty = math.inf if p < 0 else 0.0
        return torch.full((), empty, dtype=torch.float32, device=part.device)
    narrow = part.dtype in (torch.float16, torch.bfloat16)
    if not is_scaled:
        return torch.linalg.vector_norm(part, p, dtype=torch.float32 if narrow else None)
    part = part.float() if narrow else part
    scale = _divisor(torch.linalg.vector_norm(part, math.inf if p > 0 else -math.inf))
    return torch.linalg.vector_norm(part / scale, p).double() * scale


def _cut_axes(spec: DTensorSpec) -> tuple[DeviceMesh, tuple[int, ...]]:
    """Return the mesh and the axes along which ranks have different parts."""
    axes = tuple(axis for axis, p in enumerate(spec.placements) if p.is_shard())
    return spec.mesh, axes if spec.coordinate is not None else ()


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of tensors that are cut along the same axes of one mesh.

    Attributes:
        numbers: Of the tensors in the list.
        parts: This rank's parts of them.
        mesh: Theirs; None for plain tensors.
        values: The norm of each, float64 [k]; the same on all ranks of the mesh.
        is_inside: Whether this rank is in the mesh; else it has no elements, and norms are 0.
    """

    numbers: list[int]
    parts: list[torch.Tensor]
    mesh: DeviceMesh | None
    values: torch.Tensor
    is_inside: bool


def norms_by_mesh(tensors: Sequence[torch.Tensor], p: float, in_total: bool) -> list[Norms]:
    """Return norms by the axes that cut the tensors.

    Args:
        tensors: DTensors of any meshes, and plain ones, taken to be the same on all ranks.
        p: The p of the norm.
        in_total: Combine the norms of tensors that are cut alike, so that `values` is [1].

    Collective: all ranks of the meshes.
    Cost: for all tensors that are cut by the same axes one all_gather along each of these axes, of
        8 bytes for each tensor, or of 8 bytes if `in_total`.
    """
    groups: dict[Any, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        if type(tensor) is not DTensor:
            groups[(None, (), True), tensor.device].append((number, tensor))
            continue
        check_copy("norm", tensor)
        spec = tensor.spec.without_terms()
        part = redistribute(tensor.part, tensor.spec, spec)
        inside = spec.coordinate is not None
        groups[(*_cut_axes(spec), inside), part.device].append((number, part))
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
    """Return the p-norm of each tensor: replicated DTensors, of plain tensors plain ones.

    Cost:
        One all_gather along each axis that cuts tensors, for all that are cut by the same axes.
    """
    found: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(tensors)
    for norms in norms_by_mesh(tensors, p, in_total=False):
        mesh = norms.mesh
        for number, part, norm in zip(
            norms.numbers, norms.parts, norms.values.unbind(), strict=True
        ):
            kind = dtype or part.dtype
            norm = norm.to(kind.to_real() if kind.is_complex else kind)  # noqa: PLW2901
            if mesh is not None:
                norm = wrap(norm, spec_of(mesh, (R,) * mesh.ndim, TensorMeta.of(norm)))  # noqa: PLW2901
            found[number] = norm
    return found


@special(aten._foreach_norm.Scalar, lists=True)
def _foreach_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    names = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    return norms_of(names["self"], float(names.get("ord", 2)), names.get("dtype"))
