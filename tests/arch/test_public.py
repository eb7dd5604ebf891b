"""Public names (src/dure/public.txt): signatures, and imports of examples and documents."""

import ast
import importlib
import inspect
import re
import textwrap
import typing
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dure.torch_names import public
from tests.arch.sources import ROOT, tree_of
from tests.docs.snippets import PAGES

MADE_BY_DURE = {
    "checkpoint.FileSystemReader.read_catalog": "`load` reads its own storages by it",
    "checkpoint.FileSystemReader.fill": "the same",
    "checkpoint.HuggingFaceStorageReader.read_catalog": "the same",
    "checkpoint.HuggingFaceStorageReader.fill": "the same",
    "checkpoint.QuantizedHuggingFaceStorageReader.read_catalog": "the same",
    "checkpoint.QuantizedHuggingFaceStorageReader.fill": "the same",
    "checkpoint.staging.AsyncStager.hold": "`async_save` calls it",
    "checkpoint.staging.BlockingAsyncStager.hold": "the same",
    "checkpoint.staging.DefaultStager.hold": "the same",
    "ProcessGroup.__init__": "`new_group` makes it",
    "ProcessGroup.hold": "for buckets and checkpoints, which wait until operations have ended",
    "Work.__init__": "collectives make it",
    "GradBucket.__init__": "DDP makes it for hooks",
    "DistributedDataParallel.divisor_of": "for the reducer",
    "DistributedDataParallel.reducer": "for hooks of Dure",
    "DistributedDataParallel.replaced": "the reducer calls it",
    "DistributedDataParallel.step_ended": "for StepMeter",
    "DistributedDataParallel.step_times": "for StepMeter",
    "_composable.fsdp.FSDPModule.step_times": "for StepMeter",
    "_composable.fsdp.UnshardHandle.__init__": "`unshard` makes it",
    "pipelining.PipelineStage.receive_forward": "schedules call it",
    "pipelining.PipelineStage.take_outputs": "schedules call it",
    "rpc.RRef.received": "calls make references",
    "rpc.RRef.made_by": "`remote` calls it",
    "rpc.RRef.pack_reference": "pickling calls it",
    "autograd.DistAutogradContext.arrive": "calls of others arrive",
    "store.JobKey.pair": "encryption of RPC",
    "tensor.Operation.__init__": "`explain` makes it",
    "_tensor.placement_types.DTensorSpec.cuts": "operators call it",
    "Join.notify_join_context": "as in torch: what it returns is opaque",
    "JoinHook.shadow": "`Join` calls it",
}
"""Members of public classes that only Dure calls: their types may be internal."""


def _modules() -> Iterator[str]:
    for path in public():
        file = ROOT / "src" / path.replace(".", "/")
        if file.is_dir() or file.with_suffix(".py").exists():
            yield path


@cache
def _values() -> dict[str, Any]:
    """Return all public names with their values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = {path: importlib.import_module(path) for path in _modules()}
        found = {f"{p}.{name}": getattr(m, name) for p, m in modules.items() for name in m.__all__}
        for path in set(public()) - set(modules):
            home, _, name = path.rpartition(".")
            found[path] = getattr(importlib.import_module(home), name)
    return found


def test_every_public_module_lists_its_names():
    _values()  # raises for a module without `__all__`, and for a name that it lacks
    assert {"dure.fsdp", "dure.rpc.api", "dure.tensor.parallel.style"} < set(_modules())
    assert not {"dure.native", "dure.env", "dure.comm", "dure.parallel"} & set(public())


PACKAGES = ["dure", "dure.rpc", "dure.nn", "dure.optim", "dure.data", "dure.checkpoint"]
PACKAGES += ["dure.tensor", "dure.fsdp", "dure.elastic", "dure.launch", "dure.pipelining"]


@pytest.mark.parametrize("path", PACKAGES)
def test_dir_lists_public_names_and_submodules(path: str):
    module = importlib.import_module(path)
    below = {p.removeprefix(f"{path}.") for p in _modules() if p.startswith(f"{path}.")}
    below = {name for name in below if "." not in name}
    assert set(dir(module)) == {n for n in {*module.__all__, *below} if not n.startswith("_")}


# ---- signatures ----------------------------------------------------------------------------------


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what of a public name has a signature: itself, or its methods, inherited ones too."""
    if inspect.isfunction(value):
        yield "", inspect.unwrap(value)
    elif inspect.isclass(value):
        ours = [
            cls for cls in reversed(value.__mro__) if cls.__module__.partition(".")[0] == "dure"
        ]
        members = {name: member for cls in ours for name, member in vars(cls).items()}
        for name, member in members.items():
            found = getattr(member, "fget", None) or getattr(member, "__func__", member)
            shown = not name.startswith("_") or name in {"__init__", "__call__", "__enter__"}
            if shown and inspect.isfunction(found):
                yield f".{name}", inspect.unwrap(found)


@cache
def _imported(module: str) -> dict[str, tuple[str, str]]:
    """Return what a module imports, below `if TYPE_CHECKING:` too."""
    nodes = ast.walk(tree_of(Path(importlib.import_module(module).__file__ or "")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {a.asname or a.name: (n.module or "", a.name) for n in imports for a in n.names}


def _types(function: Any) -> Iterator[Any]:
    """Yield the types that the annotations of a function name."""
    waiting = list(function.__annotations__.values())
    for one in waiting:
        if isinstance(one, str):
            for node in ast.walk(ast.parse(one)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    waiting.append(node.value) if node.value.isidentifier() else None
                elif isinstance(node, ast.Name) and node.id in function.__globals__:
                    waiting.append(function.__globals__[node.id])
                elif isinstance(node, ast.Name) and node.id in _imported(function.__module__):
                    module, name = _imported(function.__module__)[node.id]
                    waiting.append(getattr(importlib.import_module(module), name, None))
        elif isinstance(one, list | tuple):
            waiting += one
        elif typing.get_args(one):
            waiting += [typing.get_origin(one), *typing.get_args(one)]
        else:
            yield one


def _hidden(kind: Any, known: set[int]) -> bool:
    """Return whether a type is a class of Dure that programs have no name for.

    Protocols, and dictionaries of keyword arguments, say what an argument must have: a program
    does not name them.
    """
    if not inspect.isclass(kind) or not kind.__module__.startswith("dure") or id(kind) in known:
        return False
    return not (getattr(kind, "_is_protocol", False) or typing.is_typeddict(kind))


def test_public_signatures_use_public_types_only():
    values, found = _values(), set[str]()
    known, seen = {id(value) for value in values.values()}, set[int]()
    for path, value in values.items():
        if id(value) in seen or not str(getattr(value, "__module__", "")).startswith("dure"):
            continue
        seen.add(id(value))
        for name, function in _members(value):
            if any(_hidden(kind, known) for kind in _types(function)):
                found.add(f"{path}{name}".removeprefix("dure."))
    assert found == set(MADE_BY_DURE)


# ---- examples and documents ----------------------------------------------------------------------

PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _not_public(tree: ast.AST) -> Iterator[str]:
    """Yield names of Dure that a program uses and that are not public."""
    names = set(_values()) | set(public())
    aliases = {"dure": "dure"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases |= {alias.asname: alias.name} if alias.asname else {}
                if alias.name.startswith("dure.") and alias.name not in names:
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dure":
            for alias in node.names:
                if f"{node.module}.{alias.name}" not in names and alias.name != "*":
                    yield f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    modules = set(_modules())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            first, dot, rest = owner.partition(".")
            owner = aliases.get(first, "") + dot + rest
            used = f"{owner}.{node.attr}"
            if owner in modules and used not in names and not node.attr.startswith("__"):
                yield used


def test_examples_and_documents_use_public_names_only():
    found = [
        f"{path.name}: {name}"
        for path in sorted((ROOT / "examples").rglob("*.py"))
        for name in _not_public(tree_of(path))
    ]
    for page in [*PAGES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for block in PYTHON.findall(page.read_text()):
            tree = ast.parse(textwrap.dedent(block))
            found += [f"{page.name}: {name}" for name in _not_public(tree)]
    assert found == []
