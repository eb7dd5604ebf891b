"""Operators on lists of tensors, which optimizers call: `_foreach_*`, `_fused_*`, gradient scaling.

They compute element by element, so they run on the parts, once for a whole list: nothing is looked
up for each tensor but whether the tensors of one place lie alike. What lies otherwise (a gradient
that is a sum's terms) is brought to the placements of the first list's tensor. The tensors of a
list may be of several meshes, and plain ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from dure.comm.ops import ReduceOp
from dure.errors import MeshError, PlacementError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor import state
from dure.tensor.call import Op, schema_of
from dure.tensor.dispatch import check_copy, list_operator
from dure.tensor.dtensor import DTensor, parts_of, wrap
from dure.tensor.placement_types import Placement, Replicate, Shard, StridedShard
from dure.tensor.redistribute import redistribute
from dure.tensor.spec import DTensorSpec, TensorMeta, spec_of

__all__ = ["norm_of", "norms_of"]

aten = torch.ops.aten


def _overloads(*prefixes: str) -> list[Op]:
    """Return the operators whose name begins so, without those that write into `out`."""
    found: list[Op] = []
    for name in torch._C._dispatch_get_all_op_names():  # pyright: ignore
        base, _, overload = name.removeprefix("aten::").partition(".")
        if base.startswith(prefixes) and not overload.endswith("out"):
            found.append(getattr(getattr(aten, base), overload or "default"))
    return found


_NOT_ELEMENTWISE = ("_foreach_mm", "_foreach_norm", "_foreach_powsum", "_foreach_max.default")
_ELEMENTWISE = [
    op
    for op in _overloads("_foreach_", "_fused_adam", "_fused_sgd_", "_fused_adagrad_")
    if not str(op).removeprefix("aten.").startswith(_NOT_ELEMENTWISE)
]
_LINEAR_IN_PLACE = frozenset(
    op
    for op in _ELEMENTWISE
    if str(op).removeprefix("aten._foreach_")
    in ("zero_.default", "neg_.default", "mul_.Scalar", "mul_.ScalarList", "mul_.Tensor",
        "div_.Scalar", "div_.ScalarList", "div_.Tensor")
)  # fmt: skip
"""What may write terms of a sum: multiplies all of them by one number."""


@list_operator(*_ELEMENTWISE)
def _elementwise(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    places = [(n, a) for n, a in (*enumerate(args), *kwargs.items()) if _is_list(a)]
    first: Sequence[torch.Tensor] = places[0][1]
    specs = [t.spec if type(t) is DTensor else None for t in first]
    terms = [i for i, s in enumerate(specs) if s is not None and s.partial]
    if terms:
        _check_terms(op, specs, terms)
    result_specs = specs
    if terms and op not in _LINEAR_IN_PLACE:
        result_specs = [s and s.without_terms() for s in specs]
    filled, named = list(args), dict(kwargs)
    for where, tensors in places:
        holder: Any = filled if isinstance(where, int) else named
        parts = parts_of(tensors, result_specs)
        if parts is None:
            _check_copies(op, [(where, tensors)])
            parts = [
                tensor.part
                if type(tensor) is DTensor and tensor.spec is spec
                else _fitting(op, tensor, spec)
                for tensor, spec in zip(tensors, result_specs, strict=True)
            ]
        holder[where] = parts
    for where, arg in (*enumerate(args), *kwargs.items()):
        if isinstance(arg, torch.Tensor):
            holder = filled if isinstance(where, int) else named
            holder[where] = _one_number(op, arg)
    results = op(*filled, **named)
    mutated = schema_of(op).mutated
    if mutated:
        names = schema_of(op).names
        for where, tensors in places:
            if (names[where] if isinstance(where, int) else where) in mutated:
                torch.autograd.graph.increment_version(tensors)
    if results is None or mutated:
        return results
    if not isinstance(results[0], torch.Tensor):
        return tuple(_wrapped(one, result_specs) for one in results)
    return _wrapped(results, result_specs)


def _check_copies(op: Op, places: Sequence[tuple[int | str, Sequence[torch.Tensor]]]) -> None:
    """Refuse views that are copies, as operators on one tensor do."""
    names, mutated = schema_of(op).names, schema_of(op).mutated
    for where, tensors in places:
        for tensor in tensors:
            if type(tensor) is DTensor and tensor.copied_at is not None:
                name = names[where] if isinstance(where, int) else where
                check_copy(str(op), tensor, name in mutated)


def _is_list(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], torch.Tensor)


def _wrapped(parts: Sequence[torch.Tensor], specs: Sequence[DTensorSpec | None]) -> list[Any]:
    made: list[Any] = []
    for part, spec in zip(parts, specs, strict=True):
        if spec is not None and part.dtype != spec.meta.dtype:
            spec = spec.with_dtype(part.dtype)  # noqa: PLW2901
        made.append(part if spec is None else wrap(part, spec))
    return made


def _check_terms(op: Op, specs: Sequence[DTensorSpec | None], terms: Sequence[int]) -> None:
    """Refuse to write terms of a reduction with what is not linear."""
    linear = op in _LINEAR_IN_PLACE and all(
        p.is_partial("sum") or p.is_partial("avg") or not p.is_partial()
        for i in terms
        for p in (specs[i] or specs[terms[0]]).placements  # pyright: ignore
    )
    if schema_of(op).mutated and not linear:
        raise PlacementError(
            f"{op} would write terms of a reduction",
            op=str(op),
            seen=f"tensor {terms[0]} of the first list is {specs[terms[0]]}",
            fix="Redistribute it to Replicate() or Shard() first.",
        )


def _fitting(op: Op, tensor: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """Return the part of a tensor that meets one with this spec; None: a plain tensor."""
    if spec is None:
        return _one_number(op, tensor)
    if type(tensor) is not DTensor:
        if tensor.ndim == 0:
            return tensor
        if not state.implicit_replication.get():
            raise _plain_beside(op, tensor, spec)
        tensor = wrap(
            tensor, spec_of(spec.mesh, (Replicate(),) * spec.mesh.ndim, TensorMeta.of(tensor))
        )
    own = tensor.spec
    if own.mesh is not spec.mesh and own.mesh != spec.mesh:
        if tensor.ndim == 0:
            return _one_number(op, tensor)
        raise MeshError(
            f"{op} is given tensors of different meshes at one place of its lists",
            op=str(op),
            seen=f"{own.mesh!r} and {spec.mesh!r}",
            fix="State of an optimizer lies as its parameter does.",
        )
    shift = spec.ndim - own.ndim
    if shift < 0 or any(
        n not in (1, whole) for n, whole in zip(own.shape, spec.shape[shift:], strict=True)
    ):
        raise PlacementError(
            f"{op} is given lists whose tensors have different shapes",
            op=str(op),
            seen=f"{spec} and {own}",
            fix="Call the operator for each tensor.",
        )
    placements = [_aligned(p, own, spec) for p in spec.placements]
    return redistribute(tensor.part, own, own.with_placements(placements))


def _aligned(placement: Placement, own: DTensorSpec, spec: DTensorSpec) -> Placement:
    """Return how a tensor that is broadcast to `spec` lies where that lies so."""
    if not isinstance(placement, Shard):
        return Replicate()
    dim = placement.dim - (spec.ndim - own.ndim)
    if dim < 0 or own.shape[dim] != spec.shape[placement.dim]:
        return Replicate()
    if isinstance(placement, StridedShard):
        return StridedShard(dim, split_factor=placement.split_factor)
    return Shard(dim)


def _one_number(op: Op, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is not cut: a plain one, or a DTensor of one element."""
    if type(tensor) is not DTensor:
        return tensor
    if tensor.numel() != 1:
        raise _plain_beside(op, tensor, tensor.spec)
    whole = (Replicate(),) * tensor.spec.mesh.ndim
    return redistribute(tensor.part, tensor.spec, tensor.spec.with_placements(whole))


def _plain_beside(op: Op, tensor: torch.Tensor, spec: DTensorSpec) -> UsageError:
    return UsageError(
        f"{op} is given a plain tensor and a DTensor at one place of its lists",
        op=str(op),
        seen=f"{list(tensor.shape)} and {spec}",
        fix="Make it a DTensor, or use dure.tensor.experimental.implicit_replication().",
    )


# ---- scaling of gradients ------------------------------------------------------------------------


@list_operator(aten._amp_foreach_non_finite_check_and_unscale_.default)
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
    parts = [t.part if type(t) is DTensor else t for t in grads]
    flag = _one_number(op, found)
    op(parts, flag, _one_number(op, inverse), **kwargs)
    for mesh, axes in dict.fromkeys(_cut_axes(spec) for spec in specs):
        for axis in axes:
            mesh.get_group(axis).all_reduce(flag, ReduceOp.MAX)


# ---- norms ---------------------------------------------------------------------------------------


def _cut_axes(spec: DTensorSpec) -> tuple[DeviceMesh, tuple[int, ...]]:
    """Return the mesh and the axes along which ranks have different parts."""
    axes = tuple(axis for axis, p in enumerate(spec.placements) if p.is_shard())
    return spec.mesh, axes if spec.coordinate is not None else ()


def _powers(parts: Sequence[torch.Tensor], p: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Return for each part what norms add up: the p-th power of its norm, or the extremum."""
    if not parts:
        return torch.zeros(0)
    kind = dtype or torch.promote_types(parts[0].dtype, torch.float32)
    kind = kind.to_real() if kind.is_complex else kind
    empty = math.inf if p == -math.inf else 0.0
    norms = [
        torch.linalg.vector_norm(part, p, dtype=dtype).to(kind)
        if part.numel()
        else torch.full((), empty, dtype=kind, device=part.device)
        for part in parts
    ]
    stacked = torch.stack(norms)
    return stacked if math.isinf(p) or p == 0 else stacked**p


def _reduced(powers: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], p: float) -> None:
    """Reduce what norms add up over the ranks that have different parts, in place."""
    op = {math.inf: ReduceOp.MAX, -math.inf: ReduceOp.MIN}.get(p, ReduceOp.SUM)
    for axis in axes:
        mesh.get_group(axis).all_reduce(powers, op)


def _root(powers: torch.Tensor, p: float) -> torch.Tensor:
    return powers if math.isinf(p) or p == 0 else powers ** (1.0 / p)


def _groups(tensors: Sequence[torch.Tensor]) -> dict[Any, list[tuple[int, torch.Tensor]]]:
    """Return numbers and parts of tensors, by the mesh and axes that cut them; None: plain."""
    groups: dict[Any, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        if type(tensor) is not DTensor:
            groups[None, tensor.device].append((number, tensor))
            continue
        check_copy("norm", tensor)
        spec = tensor.spec.without_terms()
        part = redistribute(tensor.part, tensor.spec, spec)
        groups[_cut_axes(spec), part.device].append((number, part))
    return groups


def norms_of(
    tensors: Sequence[torch.Tensor], p: float, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the p-norm of each tensor: replicated DTensors, of plain tensors plain ones.

    Cost:
        One all_reduce for all tensors that are cut by the same axes.
    """
    found: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for (cut, _), members in _groups(tensors).items():
        powers = _powers([part for _, part in members], p, dtype)
        if cut is not None:
            _reduced(powers, cut[0], cut[1], p)
        for (number, part), norm in zip(members, _root(powers, p).unbind(), strict=True):
            norm = norm.to(dtype or (part.dtype.to_real() if part.is_complex() else part.dtype))  # noqa: PLW2901
            if cut is not None:
                mesh = cut[0]
                norm = wrap(norm, spec_of(mesh, (Replicate(),) * mesh.ndim, TensorMeta.of(norm)))  # noqa: PLW2901
            found[number] = norm
    return found


def norm_of(tensors: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """Return the p-norm of all elements of these tensors together, a plain tensor.

    Plain tensors are taken to be the same on all ranks.

    Cost:
        One all_reduce of one number for all tensors that are cut by the same axes.
    """
    total: torch.Tensor | None = None
    join = {math.inf: torch.maximum, -math.inf: torch.minimum}.get(p, torch.add)
    for (cut, _), members in _groups(tensors).items():
        powers = _powers([part for _, part in members], p, None).double()
        one = powers.amax() if p == math.inf else powers.amin() if p == -math.inf else powers.sum()
        if cut is not None:
            _reduced(one, cut[0], cut[1], p)
        total = one if total is None else join(total, one.to(total.device))
    return torch.zeros(()) if total is None else _root(total, p)


@list_operator(aten._foreach_norm.Scalar)
def _foreach_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    names = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    return norms_of(names["self"], float(names.get("ord", 2)), names.get("dtype"))
