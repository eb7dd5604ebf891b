"""`parallelize_module`: apply styles to modules by their names."""

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
"""Attributes of attention modules with their number of heads; the latter for layers whose names
contain a k or a v, such as k_proj and wv."""


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Make a module tensor parallel, in place.

    Args:
        module: The module, the same on all ranks.
        device_mesh: A mesh of one axis, such as ``mesh["tp"]``; if None, the one of the enclosing
            ``with mesh:`` block.
        parallelize_plan: A style for the module itself, or a dict of paths to styles. A path
            consists of the names of modules joined by dots; each name may contain ``*`` and ``?``.
            "" is the module itself.
        src_data_rank: The rank whose parameters are distributed. If None, each rank uses its own,
            without communication.

    Returns:
        The module.

    Raises:
        MeshError: No mesh, or one with more than one axis.
        UsageError: The plan has an entry that is not a style; a style does not fit its module; or,
            within `dure.tensor.strict()`, a path matches no module (otherwise that is a warning
            with similar names).
        PlacementError: An attention layer would be cut by columns, and the number of ranks does not
            divide its heads.

    Collective:
        All ranks of the mesh, with the same plan.

    Cost:
        One scatter or broadcast per parameter. For the cost of a step, see the styles.

    Example:
        ```python
        from dure.tensor import init_device_mesh
        from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
        mlp = torch.nn.Sequential(*layers)
        parallelize_module(mlp, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        assert mlp[0].weight.to_local().shape == (4, 4)  # 4 of 8 output features
        assert mlp(torch.ones(3, 4)).shape == (3, 4)     # one all_reduce
        ```
    """
    mesh = mesh_or_current(device_mesh, "parallelize_module")
    if mesh.ndim != 1:
        raise MeshError(
            "tensor parallelism needs a mesh of one axis",
            op="parallelize_module",
            seen=f"{mesh!r}",
            fix='Pass one axis, such as mesh["tp"].',
        )
    if not parallelize_plan:
        warnings.warn(
            "parallelize_plan is empty, so no module is parallelized", UsageWarning, stacklevel=2
        )
        return module
    for path, style in _checked(parallelize_plan).items():
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


def _checked(plan: ParallelStyle | Mapping[str, ParallelStyle]) -> Mapping[str, ParallelStyle]:
    """Return a plan as a dict of styles.

    Raises:
        UsageError: It is not one.
    """
    if isinstance(plan, ParallelStyle):
        return {"": plan}
    if not isinstance(plan, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            "parallelize_plan must be a style, or a dict of module paths to styles, of "
            "dure.tensor.parallel",
            op="parallelize_module",
            seen=f"{plan!r}",
            fix=import_instead_of(plan, "dure.tensor.parallel"),
        )
    for path, style in plan.items():
        if not isinstance(style, ParallelStyle):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"the plan's entry {path!r} is not a style of dure.tensor.parallel",
                op="parallelize_module",
                seen=f"{style!r}",
                fix=import_instead_of(style, "dure.tensor.parallel")
                or "Write an instance, such as ColwiseParallel().",
            )
    return plan


def _matches(name: str, path: str) -> bool:
    """Return whether a path matches a module's name, component by component."""
    names, parts = name.split("."), path.split(".")
    matches = len(names) == len(parts) and all(map(fnmatchcase, names, parts))
    return matches and bool(name) == bool(path)  # "" is the module itself, "*" is not


def _no_match(module: nn.Module, path: str) -> None:
    names = [name for name, _ in module.named_modules() if name]
    near = difflib.get_close_matches(path, names, n=3, cutoff=0.4)
    what = f"the plan's path {path!r} matches no module of {type(module).__name__}"
    known = f"similar names: {', '.join(near)}" if near else f"its modules: {', '.join(names)}"
    if state.strict.get():
        raise UsageError(what, op="parallelize_module", seen=known)
    warnings.warn(f"{what}; {known}", UsageWarning, stacklevel=3)


def _divided(parent: nn.Module, target: nn.Module, heads: int, ranks: int) -> bool:
    """Return whether the program has already divided the number of heads by the ranks."""
    size, features = getattr(parent, "head_dim", None), getattr(target, "out_features", None)
    return isinstance(size, int) and features == heads * ranks * size


def _check_heads(
    root: nn.Module, name: str, target: nn.Module, style: ParallelStyle, ranks: int
) -> None:
    """Raise if the number of ranks does not divide the heads of a layer cut by columns."""
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
                f"module {name!r} would be cut within a head",
                op="parallelize_module",
                seen=f"{parent_name}.{attribute} is {heads}, on {ranks} ranks",
                fix=f"Use an axis of {', '.join(map(str, fits))} ranks, or leave all layers of "
                "this attention out of the plan: then each rank computes all heads.",
            )
