"""What a program will import, found by reading it, not by running it.

`dure run` must know before it starts a program whether it pays to import torch first, once for all
ranks. The answer may be wrong both ways without harm: at worst torch is imported in vain, or in
each rank. So the search is short:

- The program's file is read as a syntax tree, functions included; what it names with `import` is
  looked up without importing it.
- A module that lies outside `site-packages` (beside the program, in a checkout) is read in turn,
  but only what runs when it is imported. An installed package is asked for its requirements.
- The search ends when torch is found, or after a tenth of a second.

A program whose imports are computed (`importlib.import_module(name)`) may mean Dure by it.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder

import dure
from dure.launch.ranks.child import first_path
from dure.launch.spec import JobSpec

__all__ = ["Found", "names_to_import"]

_SEARCH_S = 0.1
_LARGEST_BYTES = 1 << 20
_LIGHT = ("dure.launch", "dure.cli", "dure.errors", "dure.env", "dure.store")
_CORE = ("init_process_group", "destroy_process_group", "all_reduce")


@dataclass(slots=True)
class Found:
    """What one file imports: full names, and every attribute it uses of anything."""

    names: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    attributes: set[str] = field(default_factory=set[str])
    computed: bool = False


def names_to_import(spec: JobSpec) -> tuple[str, ...]:
    """Return what to import before the fork, torch first; nothing if torch is not among it.

    A name is a module, or `module:attribute` for a module that loads its names when they are used.
    Cost: some milliseconds a file, and a tenth of a second at most.
    """
    first = first_path(spec.kind, spec.program)
    start = _file_of_program(spec, first)
    if start is None or _is_beside(first):
        return ()
    return _Search(first).run(start)


def _file_of_program(spec: JobSpec, first: str) -> tuple[str, str] | None:
    """Return the file that is `__main__`, and the package it belongs to."""
    if spec.kind == "script":
        inner = os.path.join(spec.program, "__main__.py")
        return (inner if os.path.isdir(spec.program) else spec.program), ""
    path, name = [first, *sys.path], ""
    found: ModuleSpec | None = None
    for part in spec.program.split("."):
        name = f"{name}.{part}" if name else part
        found = PathFinder.find_spec(name, path)
        if found is None:
            return None
        path = list(found.submodule_search_locations or ())
    if path:
        found = PathFinder.find_spec(f"{name}.__main__", path)
    if found is None or not found.has_location or found.origin is None:
        return None
    return found.origin, name if path else name.rpartition(".")[0]


def _is_beside(first: str) -> bool:
    """Tell whether `import torch` finds a module of the program's own, which is for each rank."""
    own = PathFinder.find_spec("torch", [first])
    return own is not None and own.has_location


class _Search:
    """The files still to be read, those that were, and the time that is left."""

    def __init__(self, first: str) -> None:
        self._path = [first, *sys.path]
        self._seen: set[str] = set()
        self._deadline = time.monotonic() + _SEARCH_S
        self._torch: dict[str, None] = {}  # in order, each once

    def run(self, start: tuple[str, str]) -> tuple[str, ...]:
        program = read_imports(start[0], functions=True)
        waiting = deque([(program, start[1])])
        while waiting and not self._torch and time.monotonic() < self._deadline:
            found, package = waiting.popleft()
            for file, its_package in self._follow(found, package):
                waiting.append((read_imports(file), its_package))
        if not self._torch:
            return ()
        return ("torch", *(n for n in self._torch if n != "torch"), *_of_dure(program))

    def _follow(self, found: Found, package: str) -> Iterator[tuple[str, str]]:
        """Take note of torch, and yield the files that are to be read."""
        for name in (_absolute(name, level, package) for name, level in found.names):
            top = name.partition(".")[0]
            if top == "torch":
                self._torch[name] = None
            elif top == "dure":
                if not name.startswith(_LIGHT):
                    self._torch["torch"] = None
            elif top and top not in sys.stdlib_module_names:
                yield from self._files(name)

    def _files(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the files that `import name` runs, unless an installed package is to be asked."""
        path, full = self._path, ""
        for part in name.split("."):
            full = f"{full}.{part}" if full else part
            if full in self._seen and "." not in name:
                return
            spec = _find(full, path)
            if spec is None or not spec.has_location or spec.origin is None:
                return
            if "site-packages" in spec.origin or "dist-packages" in spec.origin:
                if _requires_torch(full):
                    self._torch["torch"] = None
                return
            locations = list(spec.submodule_search_locations or ())
            if full not in self._seen:
                self._seen.add(full)
                if spec.origin.endswith(".py"):
                    yield spec.origin, full if locations else full.rpartition(".")[0]
            path = locations
            if not path:
                return


def read_imports(file: str, *, functions: bool = False) -> Found:
    """Read what a file imports; nothing, if it is no Python that this version understands.

    Args:
        file: Its path.
        functions: Whether what only functions import counts, too.
    """
    found = Found()
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        if os.path.getsize(file) <= _LARGEST_BYTES:
            with open(file, "rb") as source:
                tree = ast.parse(source.read(), file)
            _collect(tree, found, functions)
    return found


def _collect(tree: ast.AST, found: Found, functions: bool) -> None:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found.names.extend((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            _collect_from(node, found)
        elif isinstance(node, ast.Attribute):
            found.attributes.add(node.attr)
            found.computed |= node.attr == "import_module"
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        elif not functions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        waiting.extend(ast.iter_child_nodes(node))


def _collect_from(node: ast.ImportFrom, found: Found) -> None:
    """`from a import b` imports a, and a.b if that is a module."""
    module = node.module or ""
    found.names.append((module, node.level))
    for alias in node.names:
        found.attributes.add(alias.name)
        if module.partition(".")[0] != "torch":
            found.names.append((f"{module}.{alias.name}".strip("."), node.level))


def _absolute(name: str, level: int, package: str) -> str:
    """Return the full name of what a relative import means; `level` is its number of dots."""
    if level == 0:
        return name
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], name]).strip(".")


def _find(name: str, path: list[str]) -> ModuleSpec | None:
    try:
        found = PathFinder.find_spec(name, path)
        if found is None and "." not in name:
            found = importlib.util.find_spec(name)  # an editable install with a finder of its own
    except (ImportError, ValueError, AttributeError):
        return None
    return found


def _requires_torch(package: str) -> bool:
    """Tell whether an installed package says that it needs torch, without an extra."""
    from importlib import metadata  # lazy: 20 ms, and most programs that run here name torch

    try:
        needed = metadata.requires(package) or []
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return any(re.match(r"torch\b(?![-_.])", line) and "extra" not in line for line in needed)


def _of_dure(program: Found) -> list[str]:
    """Return what to load of Dure, whose modules are imported when their names are used."""
    uses = any(name.partition(".")[0] == "dure" for name, _ in program.names)
    if not uses and not program.computed:
        return []
    names = {*program.attributes.intersection(dure.__all__), *_CORE}
    modules = sorted({n for n, level in program.names if n.startswith("dure.") and not level})
    return [*(f"dure:{name}" for name in sorted(names)), *modules]
