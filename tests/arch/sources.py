"""The source tree as data: files, syntax trees and imports, for the tests of its architecture."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "dure"
CSRC = ROOT / "csrc"


def python_files(under: Path = PACKAGE) -> list[Path]:
    """List the Python files below `under`, in order."""
    return sorted(under.rglob("*.py"))


def cpp_files(under: Path = CSRC) -> list[Path]:
    """List the C++ files below `under`, in order."""
    return sorted(p for p in under.rglob("*") if p.suffix in {".cpp", ".h"})


@cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file once."""
    return ast.parse(path.read_text(), str(path))


@cache
def lines_of(path: Path) -> list[str]:
    """Read a file's lines once."""
    return path.read_text().splitlines()


def script(path: str) -> ModuleType:
    """Import a script by its path from the root; it may have no ending."""
    loader = SourceFileLoader(f"script_{Path(path).stem}", str(ROOT / path))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = module_from_spec(spec)  # where dataclasses look
    loader.exec_module(module)
    return module


def shown(path: Path, line: int = 0) -> str:
    """Name a place as editors do: path from the root, and line."""
    return f"{path.relative_to(ROOT)}:{line}" if line else str(path.relative_to(ROOT))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, line) of every import in a file, wherever it stands.

    ``from a import b`` yields ``a.b``, so that a module imported by either form is seen.
    """
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method of a file, nested ones too.

    Functions are statements, which only statements hold: expressions are not looked into.
    """
    waiting: list[ast.AST] = [tree_of(path)]
    for node in waiting:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            held = getattr(node, block, ())
            waiting += held if isinstance(held, list) else ()
