"""Whether a program imports torch, found by reading it, not by running it.

`dure run` must know before it starts a program whether it pays to import torch first, once for all
ranks. The answer may be wrong both ways without harm: at worst torch is imported in vain, or in
each rank. So the search is short: the program's file and the modules beside it are read as syntax
trees, and an installed package is asked for its requirements. It ends when torch is found, or after
a tenth of a second.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import sys
import time
from collections import deque
from importlib.machinery import ModuleSpec, PathFinder

import dure
from dure.launch.ranks.child import first_path
from dure.launch.spec import JobSpec

__all__ = ["names_to_import", "variable_set_first"]

_SEARCH_S = 0.1
_LARGEST_BYTES = 1 << 20
_LIGHT = ("dure.launch", "dure.cli", "dure.errors", "dure.env", "dure.store")
_READ_BY_TORCH = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "NUMEXPR_"),
    *("PYTORCH_", "TORCH", "ATEN_", "C10_", "LD_", "MALLOC_"),
)
"""What the names begin with of variables that torch, or a library of its, reads at its import."""

_OF_OPTIMIZERS = "torch._dynamo"
"""What the first optimizer imports: for 1.3 s, if each rank does it."""

_CORE = {"init_process_group", "destroy_process_group", "all_reduce"}


def names_to_import(spec: JobSpec) -> tuple[str, ...]:
    """Return what to import before the fork, torch first; nothing if torch is not among it.

    A name is a module, or `module:attribute` for a module that loads its names when they are used.
    Cost: some milliseconds a file, and a tenth of a second at most.
    """
    first = first_path(spec.kind, spec.program)
    own = PathFinder.find_spec("torch", [first])
    if own is not None and own.has_location:  # a module of the program's own, for each rank
        return ()
    file, package = _file_of(spec, first)
    names, attributes = _read(file, package)
    if not _need_torch(names, first):
        return ()
    tree = _parsed(file)
    torch = sorted(name for name in names if name.startswith("torch."))
    if _sets_variables_for_torch(tree):
        torch = []
    elif _uses_optimizers(tree):
        torch.append(_OF_OPTIMIZERS)
    of_dure = sorted(name for name in names if name.partition(".")[0] == "dure")
    if not of_dure and "import_module" not in attributes:  # a computed import may mean it
        return ("torch", *torch)
    used = sorted(f"dure:{name}" for name in attributes.intersection(dure.__all__) | _CORE)
    return ("torch", *torch, *used, *of_dure)


def variable_set_first(spec: JobSpec) -> str:
    """Return a variable that the program sets before it imports torch, which reads it; "" if none.

    In a process that has imported torch already, it would have no effect. Only the program's own
    file is read, in the order of its lines; a name that is computed counts.
    """
    tree = _parsed(_file_of(spec, first_path(spec.kind, spec.program))[0])
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.Call)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        else:
            imported = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.partition(".")[0] == "torch" for name in imported):
            return ""
        for name in _variables_set(node):
            if name is None:
                return "the environment"
            if name.startswith(_READ_BY_TORCH):
                return name
    return ""


def _variables_set(node: ast.stmt | ast.Call) -> list[str | None]:
    """Return the variables that a statement or call sets or removes; None: a computed name."""
    if isinstance(node, ast.Call):
        function = node.func
        if not isinstance(function, ast.Attribute):
            return []
        if function.attr == "update" and _is_environ(function.value):
            of_keywords = [each.arg for each in node.keywords]
            return of_keywords + [name for each in node.args for name in _keys_of(each)]
        one = function.attr in {"setdefault", "pop"} and _is_environ(function.value)
        if one or function.attr in {"putenv", "unsetenv"}:
            return [_constant(each) for each in node.args[:1]]
        return []
    if isinstance(node, ast.AugAssign) and _is_environ(node.target):
        return _keys_of(node.value)
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    flat = [t for each in targets for t in (each.elts if isinstance(each, ast.Tuple) else [each])]
    return [
        _constant(each.slice)
        for each in flat
        if isinstance(each, ast.Subscript) and _is_environ(each.value)
    ]


def _sets_variables_for_torch(tree: ast.Module) -> bool:
    """Tell whether a program sets variables that a module of torch may read at its import."""
    return any(
        name is None or name.startswith("TORCH")
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.Call)
        for name in _variables_set(node)
    )


def _uses_optimizers(tree: ast.Module) -> bool:
    """Tell whether a program imports `torch.optim`, or names it."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [f"{getattr(node.value, 'id', '')}.{node.attr}"]
        if any(f"{name}.".startswith("torch.optim.") for name in names):
            return True
    return False


def _is_environ(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name in {"environ", "environb"}


def _keys_of(node: ast.expr) -> list[str | None]:
    if isinstance(node, ast.Dict):
        return [None if key is None else _constant(key) for key in node.keys]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict" and not node.args:
        return [each.arg for each in node.keywords]
    return [None]


def _constant(node: ast.expr) -> str | None:
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, bytes):
        value = os.fsdecode(value)
    return value if isinstance(value, str) else None


def _file_of(spec: JobSpec, first: str) -> tuple[str, str]:
    """Return the program's file, "" if it is not found, and the package that it is in."""
    if spec.kind == "script":
        inner = os.path.join(spec.program, "__main__.py")
        return (inner if os.path.isdir(spec.program) else spec.program), ""
    found, package = _find(spec.program, first), spec.program.rpartition(".")[0]
    if found is not None and found.submodule_search_locations is not None:
        found, package = _find(f"{spec.program}.__main__", first), spec.program
    return ("" if found is None else found.origin or ""), package


def _parsed(file: str) -> ast.Module:
    """Return a file's syntax tree, an empty one if it is no Python of this version."""
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        if os.path.getsize(file) <= _LARGEST_BYTES:
            with open(file, "rb") as source:
                return ast.parse(source.read(), file)
    return ast.Module([], [])


def _need_torch(names: set[str], first: str) -> bool:
    """Tell whether torch is imported by importing these names."""
    waiting, seen = deque(sorted(names)), set[str]()
    deadline = time.monotonic() + _SEARCH_S
    while waiting and time.monotonic() < deadline:
        name = waiting.popleft()
        top, parent = name.partition(".")[0], name.rpartition(".")[0]
        if top == "torch" or (top == "dure" and not name.startswith(_LIGHT)):
            return True
        if not top or name in seen or top == "dure" or top in sys.stdlib_module_names:
            continue
        seen.add(name)
        waiting.extend([parent] if parent else [])
        found = _find(name, first)
        if found is None or not found.has_location or found.origin is None:
            continue
        if "-packages" not in found.origin:
            is_package = found.submodule_search_locations is not None
            waiting.extend(_read(found.origin, name if is_package else parent)[0])
        elif _requires_torch(top):
            return True
    return False


def _read(file: str, package: str) -> tuple[set[str], set[str]]:
    """Return the full names that a file imports, and every attribute that it uses of anything.

    Relative imports start from `package`. Nothing is found in what is no Python of this version.
    """
    names, attributes = set[str](), set[str]()
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*(up if node.level else []), *filter(None, [node.module])])
            names.add(module)
            attributes.update(alias.name for alias in node.names)
            if module.partition(".")[0] != "torch":  # b of `from a import b` may be a module
                names.update(f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
    return names, attributes


def _find(name: str, first: str) -> ModuleSpec | None:
    """Find a module without importing what it is in."""
    path, full, found = [first, *sys.path], "", None
    for part in name.split("."):
        full = f"{full}.{part}" if full else part
        found = PathFinder.find_spec(full, path)
        if found is None and full == part:  # an editable install with a finder of its own
            with contextlib.suppress(ImportError, ValueError, AttributeError):
                found = importlib.util.find_spec(full)
        if found is None:
            return None
        path = list(found.submodule_search_locations or ())
    return found


def _requires_torch(package: str) -> bool:
    """Tell whether an installed package says that it needs torch, without an extra."""
    from importlib import metadata  # lazy: 20 ms, and most programs that run here name torch

    try:
        needed = metadata.requires(package) or []
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return any(re.match(r"torch\b(?![-_.])", line) and "extra" not in line for line in needed)
