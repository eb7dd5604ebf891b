"""Operators on lists of tensors, which optimizers call: `_foreach_*`, `_fused_*`, gradient scaling.

They compute element by element, so they run on the parts, once for a whole list, where the tensors
of each place lie alike; nothing else is looked up for each tensor. Other lists, also those with
terms of a sum, are gone through tensor by tensor: torch has such a form of each. The tensors of a
list may be of several meshes, and plain ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from dure.comm.ops import ReduceOp
from dure.errors import PlacementError
from dure.mesh import DeviceMesh
from dure.tensor.call import Op, R, schema_of
from dure.tensor.dispatch import check_copy, special
from dure.tensor.dtensor import DTensor, parts_of, wrap
from dure.tensor.redistribute import redistribute
from dure.tensor.spec import DTensorSpec, TensorMeta, spec_of

__all__ = ["are_parts", "norm_of", "norms_of", "parts_like"]

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


def are_parts(specs: Specs) -> bool:
    """Tell whether this rank has a part of such tensors, and no terms; plain ones are fine."""
    return not any(s is not None and (s.partial or s.coordinate is None) for s in {*specs})


def parts_like(given: Sequence[Any], specs: Specs) -> list[Any] | None:
    """Return the parts of tensors that lie as `specs` say; None if one does not.

    Plain tensors stand for plain ones, or are numbers, such as counts of steps.
    """
    if len(given) not in (0, len(specs)):
        return None
    found = parts_of(given, specs) if given else []
    if found is not None:
        return found
    lie: Specs = []
    for tensor, spec in zip(given, specs, strict=True):
        if type(tensor) is DTensor:
            lie.append(tensor.spec if spec is not None and _alike(tensor.spec, spec) else None)
        elif tensor is None or tensor.ndim == 0 or spec is None:
            lie.append(None)
        else:
            return None
    return parts_of(given, lie)


def _alike(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Tell whether the parts have the same elements of the whole."""
    same = one is other or (one.mesh is other.mesh and one.placements == other.placements)
    return same and one.shape == other.shape


@special(*_overloads("_foreach_"), *_FUSED, lists=True)
def _on_parts(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    filled, named = list(args), dict(kwargs)
    lists = {n: a for n, a in (*enumerate(args), *kwargs.items()) if _is_list(a)}
    specs: Specs = [t.spec if type(t) is DTensor else None for t in next(iter(lists.values()))]
    elementwise = not str(op).removeprefix("aten.").startswith(_NOT_ELEMENTWISE)
    alike = elementwise and are_parts(specs)
    for where, arg in (*enumerate(args), *kwargs.items()):
        holder: Any = filled if isinstance(where, int) else named
        if where in lists:
            holder[where] = parts_like(arg, specs) if alike else None
            alike = holder[where] is not None
        elif type(arg) is DTensor:
            holder[where] = _number(arg)
    if not alike and op in _FUSED:
        raise PlacementError(
            f"{op} is given lists whose tensors lie differently, or terms of a reduction",
            op=str(op),
            seen=f"the first list has {', '.join(map(str, specs))}",
            fix="Redistribute them as the first list's.",
        )
    results = op(*filled, **named) if alike else op._op_dk(_EACH, *args, **kwargs)  # pyright: ignore
    mutated, names = schema_of(op).mutated, schema_of(op).names
    for where, tensors in lists.items():
        if (names[where] if isinstance(where, int) else where) in mutated:
            torch.autograd.graph.increment_version(tensors)
    if results is None or mutated or not alike:
        return results
    if not isinstance(results[0], torch.Tensor):
        return tuple(_wrapped(one, specs) for one in results)
    return _wrapped(results, specs)


def _is_list(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and bool(arg) and isinstance(arg[0], torch.Tensor)


def _wrapped(parts: Sequence[torch.Tensor], specs: Specs) -> list[Any]:
    made: list[Any] = []
    for part, spec in zip(parts, specs, strict=True):
        if spec is not None and part.dtype != spec.meta.dtype:
            spec = spec.with_dtype(part.dtype)  # noqa: PLW2901
        made.append(part if spec is None else wrap(part, spec))
    return made


def _number(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of what is one number."""
    if type(tensor) is not DTensor:
        return tensor
    return redistribute(tensor.part, tensor.spec, tensor.spec.replicated())


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
    flag = _number(found)
    op([t.part if type(t) is DTensor else t for t in grads], flag, _number(inverse), **kwargs)
    for mesh, axes in dict.fromkeys(_cut_axes(spec) for spec in specs):
        for axis in axes:
            mesh.get_group(axis).all_reduce(flag, ReduceOp.MAX)


# ---- norms ---------------------------------------------------------------------------------------


def _cut_axes(spec: DTensorSpec) -> tuple[DeviceMesh, tuple[int, ...]]:
    """Return the mesh and the axes along which ranks have different parts."""
    axes = tuple(axis for axis, p in enumerate(spec.placements) if p.is_shard())
    return spec.mesh, axes if spec.coordinate is not None else ()


def _norms(
    tensors: Sequence[torch.Tensor], p: float, dtype: torch.dtype | None
) -> list[tuple[list[int], list[torch.Tensor], DeviceMesh | None, torch.Tensor]]:
    """Return norms by the axes that cut the tensors.

    Numbers of the tensors, their parts, their mesh, None for plain ones, and the norms of all.
    """
    groups: dict[Any, list[tuple[int, torch.Tensor]]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        if type(tensor) is not DTensor:
            groups[(None, ()), tensor.device].append((number, tensor))
            continue
        check_copy("norm", tensor)
        spec = tensor.spec.without_terms()
        part = redistribute(tensor.part, tensor.spec, spec)
        groups[_cut_axes(spec), part.device].append((number, part))
    found: list[Any] = []
    op = {math.inf: ReduceOp.MAX, -math.inf: ReduceOp.MIN}.get(p, ReduceOp.SUM)
    as_they_are, empty = math.isinf(p) or p == 0, math.inf if p == -math.inf else 0.0
    for ((mesh, axes), _), members in groups.items():
        numbers, parts = map(list, zip(*members, strict=True))
        kind = dtype or torch.promote_types(parts[0].dtype, torch.float32)
        kind = kind.to_real() if kind.is_complex else kind
        norms = torch.stack([
            torch.linalg.vector_norm(part, p, dtype=dtype).to(kind)
            if part.numel()
            else torch.full((), empty, dtype=kind, device=part.device)
            for part in parts
        ])  # fmt: skip
        if axes:
            norms = norms if as_they_are else norms**p
            for axis in axes:
                mesh.get_group(axis).all_reduce(norms, op)
            norms = norms if as_they_are else norms ** (1.0 / p)
        found.append((numbers, parts, mesh, norms))
    return found


def norms_of(
    tensors: Sequence[torch.Tensor], p: float, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the p-norm of each tensor: replicated DTensors, of plain tensors plain ones.

    Cost:
        One all_reduce for all tensors that are cut by the same axes.
    """
    found: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    for numbers, parts, mesh, norms in _norms(tensors, p, dtype):
        for number, part, norm in zip(numbers, parts, norms.unbind(), strict=True):
            norm = norm.to(dtype or (part.dtype.to_real() if part.is_complex() else part.dtype))  # noqa: PLW2901
            if mesh is not None:
                norm = wrap(norm, spec_of(mesh, (R,) * mesh.ndim, TensorMeta.of(norm)))  # noqa: PLW2901
            found[number] = norm
    return found


def norm_of(tensors: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """Return the p-norm of all elements of these tensors together, a plain tensor.

    Plain tensors are taken to be the same on all ranks.

    Cost:
        One all_reduce for all tensors that are cut by the same axes, of a number for each.
    """
    found = [norms.double() for *_, norms in _norms(tensors, p, None)]
    if not found:
        return torch.zeros(())
    norms = torch.cat([one.to(found[0].device) for one in found])
    return norms.sum() if p == 0 else torch.linalg.vector_norm(norms, p)


@special(aten._foreach_norm.Scalar, lists=True)
def _foreach_norm(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    names = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    return norms_of(names["self"], float(names.get("ord", 2)), names.get("dtype"))
