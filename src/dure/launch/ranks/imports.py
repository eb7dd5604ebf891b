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

__all__ = ["names_to_import"]

_SEARCH_S = 0.1
_LARGEST_BYTES = 1 << 20
_LIGHT = ("dure.launch", "dure.cli", "dure.errors", "dure.env", "dure.store")
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
    if spec.kind == "script":
        inner = os.path.join(spec.program, "__main__.py")
        file, package = (inner if os.path.isdir(spec.program) else spec.program), ""
    else:
        found, package = _find(spec.program, first), spec.program.rpartition(".")[0]
        if found is not None and found.submodule_search_locations is not None:
            found, package = _find(f"{spec.program}.__main__", first), spec.program
        file = "" if found is None else found.origin or ""
    names, attributes = _read(file, package)
    if not _need_torch(names, first):
        return ()
    torch = sorted(name for name in names if name.startswith("torch."))
    of_dure = sorted(name for name in names if name.partition(".")[0] == "dure")
    if not of_dure and "import_module" not in attributes:  # a computed import may mean it
        return ("torch", *torch)
    used = sorted(f"dure:{name}" for name in attributes.intersection(dure.__all__) | _CORE)
    return ("torch", *torch, *used, *of_dure)


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
    tree = ast.Module([], [])
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        if os.path.getsize(file) <= _LARGEST_BYTES:
            with open(file, "rb") as source:
                tree = ast.parse(source.read(), file)
    for node in ast.walk(tree):
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
