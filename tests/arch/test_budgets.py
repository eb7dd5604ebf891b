"""Sizes of files, functions and parameter lists.

The soft limits are printed (`pytest -s tests/arch/test_budgets.py`); only the hard ones fail. What
torch.distributed dictates is listed below with its reason.
"""

import ast
from pathlib import Path

from arch.sources import (
    PACKAGE,
    ROOT,
    cpp_files,
    functions_of,
    lines_of,
    python_files,
    shown,
    tree_of,
)

SOFT_FILE, HARD_FILE = 700, 1000
SOFT_CPP, HARD_CPP = 700, 1000
SOFT_FUNCTION, HARD_FUNCTION = 40, 80
SOFT_PARAMETERS, HARD_PARAMETERS = 5, 8

AS_TORCH = "the signature of torch.distributed's function of that name"
AS_TORCH_CLASS = "the signature of torch.distributed's class of that name"
MORE_PARAMETERS = {
    "init_process_group": AS_TORCH,
    "new_group": AS_TORCH,
    "async_save": AS_TORCH,
    "DistributedDataParallel.__init__": "the signature of torch.nn.parallel's class of that name",
    "SyncBatchNorm.__init__": "the signature of torch.nn's class of that name",
    "PowerSGDState.__init__": AS_TORCH_CLASS,
    "PipelineStage.__init__": AS_TORCH_CLASS,
    "PipelineScheduleSingle.__init__": AS_TORCH_CLASS,
    "PipelineScheduleMulti.__init__": AS_TORCH_CLASS,
    "ScheduleLoopedBFS.__init__": AS_TORCH_CLASS,
    "DureError.__init__": "every field of an error, keyword-only",
    "demo": "typer reads the options of a command from its parameters",
    "layouts": "typer reads the options of a command from its parameters",
    "memory": "typer reads the options of a command from its parameters",
    "bench": "typer reads the options of a command from its parameters",
}


def _check(kind: str, sizes: list[tuple[int, str]], soft: int, hard: int) -> None:
    large = sorted((s for s in sizes if s[0] > soft), reverse=True)
    for size, where in large:
        print(f"{kind}: {size:4d} (soft limit {soft}) {where}")
    assert sizes
    assert not [s for s in large if s[0] > hard], f"{kind}: more than {hard}"


def _all_python() -> list[Path]:
    return [
        p
        for folder in (PACKAGE, ROOT / "examples", ROOT / "benchmarks", ROOT / "tests")
        for p in python_files(folder)
    ]


def _qualified(path: Path) -> dict[ast.AST, str]:
    """Map each method of a file to Class.method."""
    return {
        child: f"{node.name}.{child.name}"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        for child in node.body
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_python_files_are_short():
    _check(
        "lines of a file",
        [(len(lines_of(p)), shown(p)) for p in _all_python()],
        SOFT_FILE,
        HARD_FILE,
    )


def test_cpp_files_are_short():
    _check(
        "lines of a C++ file",
        [(len(lines_of(p)), shown(p)) for p in cpp_files()],
        SOFT_CPP,
        HARD_CPP,
    )


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its `def`, without its docstring."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def test_functions_are_short():
    sizes = [
        (_code_lines(f), f"{shown(path, f.lineno)} {f.name}")
        for path in _all_python()
        for f in functions_of(path)
    ]
    _check("lines of a function", sizes, SOFT_FUNCTION, HARD_FUNCTION)


def test_parameter_lists_are_short():
    sizes: list[tuple[int, str]] = []
    for path in python_files():
        names = {node.lineno: name for node, name in _qualified(path).items()}  # type: ignore[attr-defined]
        for f in functions_of(path):
            name = names.get(f.lineno, f.name)
            if name in MORE_PARAMETERS:
                continue
            given = [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)]
            count = len([a for a in given if a not in {"self", "cls"}])
            sizes.append((count, f"{shown(path, f.lineno)} {name}"))
    _check("parameters", sizes, SOFT_PARAMETERS, HARD_PARAMETERS)
