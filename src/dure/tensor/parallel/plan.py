"""`parallelize_module`: styles by the names of modules."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from dure.errors import MeshError, PlacementError, UsageError, UsageWarning
from dure.mesh import DeviceMesh
from dure.tensor import state
from dure.tensor.dtensor import mesh_or_current
from dure.tensor.parallel.styles import ColwiseParallel, ParallelStyle, share_inputs
from dure.tensor.parameter_names import name_parameters
from dure.tensor.spec import import_instead_of

__all__ = ["parallelize_module"]

_HEADS = ("n_heads", "num_heads", "num_attention_heads")
_KEY_VALUE_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
"""Under what names attention modules keep how many heads they have; the latter for layers whose
names have a k or a v in them, as k_proj and wv."""


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Make a module tensor parallel, in place.

    Args:
        module: The module, alike on all ranks.
        device_mesh: Of one axis, such as ``mesh["tp"]``; that of ``with mesh:`` where None.
        parallelize_plan: A style for the module itself, or a dict of paths to styles. A path has
            the names of modules joined by dots, each of which may have ``*`` and ``?``; "" is the
            module itself.
        src_data_rank: Which rank's parameters are distributed; None: each rank's own, without
            communication.

    Returns:
        The module.

    Raises:
        MeshError: The mesh has not one axis.
        UsageError: A style does not fit its module; the module is named.
        PlacementError: Heads of an attention that is cut by columns do not divide by the ranks.
        UsageError: Within `dure.tensor.strict()`: a path matches nothing. Else that is a warning,
            with the names that are near.

    Collective:
        All ranks of the mesh, with the same plan: parameters are scattered or broadcast.

    Cost:
        Here one scatter or broadcast a parameter; of a step, see the styles.
    """
    mesh = mesh_or_current(device_mesh, "parallelize_module")
    if mesh.ndim != 1:
        raise MeshError(
            "tensor parallelism takes one axis of a mesh",
            op="parallelize_module",
            seen=f"{mesh!r}",
            fix='Pass mesh["tp"], or however the axis is called.',
        )
    if not parallelize_plan:
        warnings.warn(
            "parallelize_plan is empty, so no module is parallelized", UsageWarning, stacklevel=2
        )
        return module
    if isinstance(parallelize_plan, ParallelStyle):
        parallelize_plan = {"": parallelize_plan}
    if not isinstance(parallelize_plan, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            "parallelize_plan must be a style, or a dict of module paths to styles, of "
            "dure.tensor.parallel",
            op="parallelize_module",
            seen=f"{parallelize_plan!r}",
            fix=import_instead_of(parallelize_plan, "dure.tensor.parallel"),
        )
    for path, style in parallelize_plan.items():
        if not isinstance(style, ParallelStyle):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"the plan's entry {path!r} is not a style of dure.tensor.parallel",
                op="parallelize_module",
                seen=f"{style!r}",
                fix=import_instead_of(style, "dure.tensor.parallel")
                or "Write an instance, such as ColwiseParallel().",
            )
        modules = module.named_modules(remove_duplicate=False)
        found = [(name, target) for name, target in modules if _matches(name, path)]
        if not found:
            _no_match(module, path)
        for name, target in found:
            _check_heads(module, name, target, style, mesh.size())
            style.src_data_rank = src_data_rank
            try:
                style._apply(target, mesh)  # pyright: ignore[reportPrivateUsage]
            except UsageError as error:
                raise type(error)(
                    f"module {name or type(module).__name__!r}: {error.what}",
                    op="parallelize_module",
                    seen=error.seen,
                    fix=error.fix,
                ) from error
    name_parameters(module)
    share_inputs(module)
    return module


def _matches(name: str, path: str) -> bool:
    """Tell whether a path is that of a module, component by component; "" is the outermost."""
    names, parts = name.split("."), path.split(".")
    alike = len(names) == len(parts) and all(map(fnmatchcase, names, parts))
    return alike and bool(name) == bool(path)


def _no_match(module: nn.Module, path: str) -> None:
    names = [name for name, _ in module.named_modules() if name]
    near = difflib.get_close_matches(path, names, n=3, cutoff=0.4)
    what = f"the plan's path {path!r} matches no module of {type(module).__name__}"
    told = f"near names are {', '.join(near)}" if near else f"its modules are {', '.join(names)}"
    if state.strict.get():
        raise UsageError(what, op="parallelize_module", seen=told)
    warnings.warn(f"{what}: {told}", UsageWarning, stacklevel=3)


def _divided(parent: nn.Module, target: nn.Module, heads: int, ranks: int) -> bool:
    """Tell whether a program has divided the number of heads already, as its parent counts them."""
    size, features = getattr(parent, "head_dim", None), getattr(target, "out_features", None)
    return isinstance(size, int) and features == heads * ranks * size


def _check_heads(
    root: nn.Module, name: str, target: nn.Module, style: ParallelStyle, ranks: int
) -> None:
    """Raise where the parent of a layer cut by columns has heads that the ranks do not divide."""
    if not isinstance(style, ColwiseParallel) or "." not in name:
        return
    parent_name, _, own_name = name.rpartition(".")
    parent = root.get_submodule(parent_name)
    key_value = any(letter in own_name for letter in "kv")
    names = [n for n in _KEY_VALUE_HEADS if key_value and hasattr(parent, n)]
    for attribute in names or _HEADS:
        heads = getattr(parent, attribute, None)
        if isinstance(heads, int) and heads % ranks and not _divided(parent, target, heads, ranks):
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            raise PlacementError(
                f"module {name!r} would be cut through its heads",
                op="parallelize_module",
                seen=f"{parent_name}.{attribute} is {heads}, on {ranks} ranks",
                fix=f"Use an axis of {', '.join(map(str, fits))} ranks, or leave all layers of "
                "this attention out of the plan: then each rank computes all heads.",
            )
