"""What the user asked to run: checked once, before anything is started.

A mistake here is one clear line and nothing has to be ended.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from importlib.machinery import ModuleSpec, PathFinder

from dure.errors import UsageError
from dure.launch.spec import JobSpec

__all__ = ["check_program"]


def check_program(spec: JobSpec) -> None:
    """Raise `UsageError` if the job cannot be started as it was asked for."""
    if spec.nproc < 1:
        raise UsageError("the number of processes must be at least 1", seen=f"--nproc {spec.nproc}")
    if spec.grace_s is not None and spec.grace_s < 0:
        raise UsageError("the grace time cannot be negative", seen=f"{spec.grace_s} s")
    if spec.kind == "script":
        _check_script(spec.program)
    elif spec.kind == "module":
        _check_module(spec.program)
    elif shutil.which(spec.program) is None:
        raise UsageError("no such program", seen=spec.program, fix="Check its name and mode.")


def _check_script(path: str) -> None:
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "__main__.py")):
            raise UsageError("not a file", seen=f"{path} is a directory without __main__.py")
        return
    if not os.path.exists(path):
        raise UsageError("no such file", seen=path, fix="For a module, use -m.")
    if not os.access(path, os.R_OK):
        raise UsageError("the file cannot be read", seen=path)


def _check_module(name: str) -> None:
    """Look the module up without importing its packages, which is the ranks' business.

    A package with an import hook of its own is left to the ranks, who say it as well.
    """
    top, *rest = name.split(".")
    spec = _find_top(top) if top and all(rest) else None
    path = top
    for part in rest:
        if spec is None or not _is_plain(spec):
            break
        path = f"{path}.{part}"
        spec = _find_in(spec, path)
    if spec is None:
        raise UsageError("no such module", seen=path or name, fix="For a file, leave out -m.")
    is_package = spec.submodule_search_locations is not None and _is_plain(spec)
    if is_package and _find_in(spec, f"{name}.__main__") is None:
        raise UsageError("the package cannot be run", seen=f"{name} has no __main__.py")


def _find_in(package: ModuleSpec, name: str) -> ModuleSpec | None:
    return PathFinder.find_spec(name, list(package.submodule_search_locations or ()))


def _find_top(name: str) -> ModuleSpec | None:
    sys.path.insert(0, os.getcwd())  # where `python -m` looks first
    try:
        return importlib.util.find_spec(name)
    except (ValueError, ImportError):
        return None
    finally:
        del sys.path[0]


def _is_plain(spec: ModuleSpec) -> bool:
    """Whether the ordinary path finder found it, so that it finds what is below, too."""
    return PathFinder.find_spec(spec.name, _parent_path(spec)) is not None


def _parent_path(spec: ModuleSpec) -> list[str] | None:
    if spec.submodule_search_locations:
        return [os.path.dirname(location) for location in spec.submodule_search_locations]
    return [os.path.dirname(spec.origin)] if spec.origin else None
