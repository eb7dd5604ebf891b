"""Whether a program imports torch, found by reading it, not by running it.

`dure run` must know before it starts a program whether it pays to import torch first, once for all
ranks. The program's file and the modules beside it are searched by regular expressions, packages
and namespace packages included. A wrong answer does no harm: at worst torch is imported without
need, or once in each rank. `--preload torch` covers what is not found (a program that imports torch
only through an installed package).
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import re
import sys
from pathlib import Path

import dure
from dure.launch.ranks.child import first_path
from dure.launch.spec import JobSpec

__all__ = ["names_to_import", "variable_set_first"]

_MAX_FILES = 200
_MAX_BYTES = 1 << 20
_LIGHT = ("dure.launch", "dure.cli", "dure.errors", "dure.env", "dure.store")
"""What a program may import of Dure without importing torch."""

_OF_OPTIMIZERS = "torch._dynamo"
"""What the first optimizer imports: for 1.3 s, if each rank does it."""

_CORE = {"init_process_group", "destroy_process_group", "all_reduce"}

_COMMENT = re.compile(r"(?m)(?:^|[ \t])#.*$")
_IMPORT = re.compile(r"(?m)^[ \t]*(?:import|from)[ \t]+(.+)")
_TORCH = re.compile(r"(?m)^[ \t]*(?:import|from)[ \t]+(?:.*,[ \t]*)?torch\b")
_OPTIMIZERS = re.compile(r"\btorch\.optim\b|\bfrom\s+torch\s+import\b.*\boptim\b")
_VARIABLE = re.compile(
    r"\b(?:OMP|KMP|GOMP|MKL|ONEDNN|DNNL|OPENBLAS|NUMEXPR|LD|MALLOC"
    r"|PYTORCH|TORCH|TORCHDYNAMO|TORCHINDUCTOR|ATEN|C10)_[A-Z]\w*|\bDURE_STAND_IN\b"
)
"""A variable that torch, or a library that it loads, reads at its import."""


def names_to_import(spec: JobSpec) -> tuple[str, ...]:
    """Return what to import before the fork, torch first; nothing if torch is not among it.

    A name is a module, or `module:attribute` for a module that loads its names when they are used.

    Cost:
        Some 0.1 ms per file, of 200 files at most.
    """
    first = Path(first_path(spec.kind, spec.program))
    text = _read(_program_file(spec, first))
    names = _imported(text)
    if any(name.startswith(".") for name in names):  # of the package that the program is in
        names.add(spec.program.partition(".")[0])
    if not any(map(_needs_torch, names | _imported_beside(names, first))):
        return ()
    torch = sorted(name for name in names if name.startswith("torch."))
    if any(name.startswith("TORCH") for name in _VARIABLE.findall(text)):
        torch = []  # a module of torch may read it at its import
    elif _OPTIMIZERS.search(text):
        torch.append(_OF_OPTIMIZERS)
    of_dure = sorted(name for name in names if name.partition(".")[0] == "dure")
    if not of_dure:
        return ("torch", *torch)
    used = set(re.findall(r"\w+", text)).intersection(dure.__all__) | _CORE
    return ("torch", *torch, *(f"dure:{name}" for name in sorted(used)), *of_dure)


def variable_set_first(spec: JobSpec) -> str:
    """Return a variable for torch that the program names before it imports torch; "" if none.

    In a process that has imported torch already, setting it would have no effect. Only the
    program's own file is read, up to its first import of torch.
    """
    text = _read(_program_file(spec, Path(first_path(spec.kind, spec.program))))
    found = _VARIABLE.search(_TORCH.split(text, maxsplit=1)[0])
    return "" if found is None else found[0]


def _program_file(spec: JobSpec, first: Path) -> Path:
    """Return the program's file, which may not exist."""
    if spec.kind == "script":
        path = Path(spec.program)
        return path / "__main__.py" if path.is_dir() else path
    top, *rest = spec.program.split(".")
    places = [first / top]
    with contextlib.suppress(ImportError, ValueError, AttributeError):
        found = importlib.util.find_spec(top)
        places += map(Path, (found and found.submodule_search_locations) or ())
    paths = [place.joinpath(*rest) for place in places]
    files = [file for path in paths for file in (path / "__main__.py", Path(f"{path}.py"))]
    return next(filter(Path.is_file, files), files[0])


def _imported_beside(names: set[str], first: Path) -> set[str]:
    """Return the names imported by the modules in `first` that `names` lead to."""
    found, waiting, files_left = set[str](), set(names), _MAX_FILES
    while waiting and files_left > 0:
        name = waiting.pop()
        top = name.partition(".")[0]
        found.add(name)
        if not top or top in sys.stdlib_module_names:
            continue
        module = first / f"{top}.py"
        files = [module] if module.is_file() else (first / top).rglob("*.py")
        for file in itertools.islice(files, files_left):
            files_left -= 1
            waiting |= _imported(_read(file)) - found
    return found


def _needs_torch(name: str) -> bool:
    top = name.partition(".")[0]
    return top == "torch" or (top == "dure" and not name.startswith(_LIGHT))


def _imported(text: str) -> set[str]:
    """Return all names in the lines that import something, modules or not."""
    return {name for line in _IMPORT.findall(text) for name in re.findall(r"[\w.]+", line)}


def _read(file: Path) -> str:
    """Return a file's text without comments; nothing of a file that cannot be read, or is huge."""
    with contextlib.suppress(OSError):
        if file.is_file() and file.stat().st_size <= _MAX_BYTES:
            return _COMMENT.sub("", file.read_text(errors="replace"))
    return ""
