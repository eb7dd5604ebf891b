"""Private names of torch are used through `dure.torch_private`, and are in the installed torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from dure import torch_private
from dure.errors import TorchVersionError
from dure.torch_names import table
from tests.arch.sources import PACKAGE, ROOT, python_files, shown, tree_of

DOOR = PACKAGE / "torch_private.py"
EXCEPTIONS = {
    # a rank begins here, before Dure may be imported
    "launch/ranks/child.py": {"torch.numa.binding._maybe_apply_numa_binding_to_current_process"},
}
"""Uses elsewhere; `torch_private.LATER` has the same names, so that they are checked."""
WITHOUT_AN_IMPORT = {
    # the launcher has torch only if the program has imported it
    "launch/functions.py": "torch._C._autograd._get_sequence_nr",
    # loaded by `import torch`; older torches have no such set
    "torch_backend/__init__.py": "_FR_SELF_RECORDING_BACKENDS",
    # loaded by `import torch`, and checks for it with an error of its own
    "torch_backend/standing_in.py": "_torch._world.pg_map",
}
"""Uses through variables, that no import shows."""
AT_TORCHS_PATHS = {
    PACKAGE / f"{path.replace('.', '/')}.py"
    for path, homes in table()["paths"].items()
    if any(home.startswith("torch.") for home in homes)
}
"""They re-export names of torch, private ones too, under torch's paths."""
DEFINES_OPERATORS = "torch.distributed._functional_collectives"
"""A module that is imported for the operators that it defines, and not for a name."""


def _is_private(path: str) -> bool:
    return any(re.match(r"_[^_]", part) for part in path.split(".")[1:])


def _paths_by_name() -> dict[str, str]:
    """Return the path of torch that each name of the door stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree_of(DOOR)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        call = getattr(node, "value", None)
        if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "_find"):
            continue
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(call.args[0], ast.Constant):
                found[target.id] = str(call.args[0].value)
    return found


def _bindings(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (variable, path of what it is bound to, line) of a file's imports."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                yield bound, alias.name if alias.asname else bound, node.lineno
                if not alias.asname:
                    yield "", alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}", node.lineno


def _chains(tree: ast.AST) -> Iterator[tuple[list[str], int]]:
    """Yield the parts and the line of each longest chain of attributes that begins with a name."""
    for node in ast.iter_child_nodes(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name):
            yield [inner.id, *reversed(parts)], inner.lineno
        else:
            yield from _chains(node)


def _uses(path: Path, by_name: dict[str, str]) -> Iterator[tuple[str, int, bool]]:
    """Yield (path of torch, line, whether it came through the door) of each private use."""
    bound: dict[str, tuple[str, bool]] = {}
    door = "dure.torch_private"
    for variable, origin, line in _bindings(path):
        through = origin.startswith(f"{door}.")
        target = by_name.get(origin.removeprefix(f"{door}."), "") if through else origin
        if target.startswith("torch") and variable:
            bound[variable] = target, through
        if target.startswith("torch.") and _is_private(target) and target != DEFINES_OPERATORS:
            yield target, line, through
    for parts, line in _chains(tree_of(path)):
        if parts[0] == "torch_private" and parts[1] in by_name:
            yield ".".join([by_name[parts[1]], *parts[2:]]), line, True
        elif parts[0] in bound:
            base, through = bound[parts[0]]
            name = ".".join([base, *parts[1:]])
            if _is_private(name):
                yield name, line, through


@cache
def _all_uses() -> list[tuple[Path, str, int, bool]]:
    by_name = _paths_by_name()
    return [
        (path, *use)
        for path in python_files()
        if path != DOOR and path not in AT_TORCHS_PATHS
        for use in _uses(path, by_name)
    ]


def test_private_names_of_torch_are_used_through_one_module():
    offenders = [
        f"{shown(path, line)} {name}"
        for path, name, line, through in _all_uses()
        if not through and name not in EXCEPTIONS.get(str(path.relative_to(PACKAGE)), ())
    ]
    assert not offenders, "use dure.torch_private"


def test_every_name_that_is_used_through_it_is_looked_up_when_it_is_imported():
    listed = {*torch_private.NAMES}
    unlisted = [
        f"{shown(path, line)} {name}"
        for path, name, line, through in _all_uses()
        if through
        and not any(name == known or known.startswith(f"{name}.") for known in listed)
        # an attribute of a listed class or value: of enumerations, and methods of classes
        and name.rpartition(".")[0] not in listed
        and name.rpartition(".")[0].rpartition(".")[0] not in listed
    ]
    assert not unlisted
    seen = {name for _, name, _, _ in _all_uses()}
    unused = [
        path
        for path in _paths_by_name().values()
        if not any(name == path or name.startswith(f"{path}.") for name in seen)
    ]
    assert not unused, "remove them from dure.torch_private"


def test_exceptions_are_used_and_are_looked_up_too():
    for file, names in EXCEPTIONS.items():
        assert names <= {name for name, _, _ in _uses(PACKAGE / file, {})}
        assert names <= torch_private.LATER.keys()
    for file, name in WITHOUT_AN_IMPORT.items():
        assert name in (PACKAGE / file).read_text()
        assert any(path.endswith(name.removeprefix("_torch.")) for path in torch_private.LATER)


@pytest.mark.parametrize("path", torch_private.LATER)
def test_later_name_is_found_or_refused_with_the_versions_that_have_it(path: str):
    since = torch_private.LATER[path]
    if tuple(map(int, since.split("."))) <= tuple(map(int, torch.__version__.split(".")[:2])):
        assert torch_private.later(path) is not None
    else:
        with pytest.raises(TorchVersionError, match=re.escape(since)):
            torch_private.later(path)


def test_later_name_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch._C._autograd, "_get_sequence_nr")
    with pytest.raises(TorchVersionError) as raised:
        torch_private.later("torch._C._autograd._get_sequence_nr")
    assert "torch._C._autograd._get_sequence_nr" in (raised.value.seen or "")


def test_missing_names_are_refused_at_import_all_at_once():
    program = """
import torch
del torch._C._is_alias_of, torch._C._dynamo.eval_frame._FrameAction
torch.__version__ = "2.99.0"
try:
    import dure.comm.collectives
except ImportError as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    said = done.stdout
    assert said.startswith("TorchVersionError"), done.stderr
    assert "torch 2.99.0" in said
    assert "torch._C._is_alias_of" in said
    assert "torch._C._dynamo.eval_frame._FrameAction" in said
    assert "2.11 to 2.15" in said


def test_versions_are_those_of_the_requirement():
    with (ROOT / "pyproject.toml").open("rb") as file:
        required = tomllib.load(file)["project"]["dependencies"]
    newest = torch_private.NEWEST.split(".")
    above = f"{newest[0]}.{int(newest[1]) + 1}"
    assert f"torch>={torch_private.OLDEST},<{above}" in required
