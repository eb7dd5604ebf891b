"""Names of torch that do not exist in Dure, and submodules that are imported on first use.

The table `torch_names.toml` has a replacement for every public name of torch.distributed that has
no equivalent here. A module that such names could be imported from ends with::

    if not TYPE_CHECKING:  # a type checker that saw a `__getattr__` would accept any name
        __getattr__, __dir__ = lazy_names(__name__)

`from dure.fsdp import FullyShardedDataParallel` is then an ImportError that says what to write
instead. `scripts/torch_names` writes the modules that exist only at torch's paths, and
`scripts/public_names` what type checkers see of the others.

Internal: names here may change in any release.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = [
    "TYPE_CHECKING",
    "attribute",
    "lazy_names",
    "listed",
    "names_of",
    "public",
    "refuse",
    "table",
]


@cache
def table() -> dict[str, Any]:
    """Read the table: `paths` and `listed`."""
    import tomllib  # lazy: needed only after a mistake

    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


@cache
def listed(module: str, name: str = "*") -> str | None:
    """Return what to write instead of a name of a module of torch; None if it is not listed.

    Args:
        module: The path without `torch.distributed.`, or "" for torch.distributed itself.
        name: "*" for the module itself.
    """
    module = module or "."
    for row in table()["listed"]:
        for path in row["module"].split():
            everything = row["names"] == "*" and f"{module}.".startswith(f"{path}.")
            if everything or (path == module and _matches(name, row["names"])):
                return f"{row['use']}. Reason: {row['why']}."
    return None


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def refuse(module: str, name: str = "*") -> NoReturn:
    """Raise the ImportError of a listed name or module.

    Raises:
        ImportError: Always.
    """
    what = module if name == "*" else f"{module}.{name}"
    text = re.sub(r"\[(.*?)\]\(.*?\)", r"docs/\1", listed(_path(module), name) or "")
    raise ImportError(f"{what} does not exist. Instead: {text}", name=module)


_absent: set[str] = set()
"""Submodules that do not exist."""


def attribute(module: str, name: str) -> Any:
    """Import a submodule and return it. The modules' `__getattr__` call this.

    Raises:
        ImportError: torch has the name, and Dure has something else instead.
        AttributeError: Neither has it.
    """
    if not name.startswith("__"):
        if listed(_path(module), name):
            refuse(module, name)
        path = f"{module}.{name}"
        if path not in _absent:
            try:
                return importlib.import_module(path)
            except ModuleNotFoundError as error:
                if error.name not in {path, module}:
                    raise
                _absent.add(path)
    raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)


@cache
def public() -> list[str]:
    """Return the public modules, and the public names of other modules (`public.txt`)."""
    lines = Path(__file__).with_name("public.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def names_of(module: str) -> list[str]:
    """Return the public names and submodules of a module, for its `__dir__`."""
    names: list[str] = sys.modules[module].__all__
    below = (path.removeprefix(f"{module}.") for path in public() if path.startswith(f"{module}."))
    found = {*names, *(path for path in below if "." not in path)}
    return sorted(name for name in found if not name.startswith("_"))


def lazy_names(
    module: str, homes: Mapping[str, Sequence[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a module.

    Args:
        module: Its name.
        homes: Names that are imported on first use, by the module that has them.
    """
    home_of = {name: home for home, names in (homes or {}).items() for name in names}

    def get(name: str) -> Any:
        if name not in home_of:
            return attribute(module, name)
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[module], name, value)
        return value

    return get, partial(names_of, module)


def _path(module: str) -> str:
    return module.removeprefix("dure").removeprefix(".")
