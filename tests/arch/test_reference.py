"""Every public name has an entry in the reference of docs/, and a docstring for it."""

import importlib
import pkgutil
import re
from contextlib import suppress
from types import ModuleType

import dure
from arch.sources import ROOT

ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
ENTRIES = [
    name
    for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
    for name in ENTRY.findall(page.read_text())
]
# Modules that list names but have no entry, and why.
INSIDE = {
    "cli": "commands, told in pages of their own",
    "env": "variables are told where they matter",
    "errorfile": "its `record` is dure's",
    "layout": "arithmetic below the mesh",
    "mesh": "its names are those of dure.device_mesh",
    "native": "the engine, for comm and rpc alone",
    "parallel": "its names are dure's, and those of torch's paths",
    "placement": "what `dure run` finds out",
    "store": "its names are dure's",
}
# torch's modules below those of dure, whose names count as public, too.
DEEPER = (
    "checkpoint.format_utils",
    "checkpoint.staging",
    "checkpoint.state_dict",
    "checkpoint.stateful",
    "comm.functional",
    "nn.experts",
    "nn.functional",
    "pipelining.microbatch",
    "tensor.debug",
    "tensor.experimental",
    "tensor.parallel",
)


def _modules() -> list[str]:
    found = [m.name for m in pkgutil.iter_modules(dure.__path__) if not m.name.startswith("_")]
    assert set(INSIDE) <= set(found)
    return ["dure", *(f"dure.{name}" for name in [*found, *DEEPER] if name not in INSIDE)]


def _public() -> list[tuple[str, str, object]]:
    """List (module, name, value) of all public names."""
    found = []
    for path in _modules():
        module = importlib.import_module(path)
        found += [
            (path, name, getattr(module, name))
            for name in getattr(module, "__all__", ())
            if not name.startswith("_") and not isinstance(getattr(module, name), ModuleType)
        ]
    return found


def test_every_public_name_has_an_entry():
    told = [value for path, _, value in _public() if path in ENTRIES]
    told += [_named(entry) for entry in ENTRIES]
    seen = {id(value) for value in told}
    missing = [f"{path}.{name}" for path, name, value in _public() if id(value) not in seen]
    assert missing == []


def test_every_entry_is_of_something():
    assert [entry for entry in ENTRIES if _named(entry) is None] == []


def _named(path: str) -> object:
    package, _, name = path.rpartition(".")
    with suppress(ModuleNotFoundError):
        value = getattr(importlib.import_module(package), name, None)
        return importlib.import_module(path) if value is None else value
    return None


def test_every_public_name_has_a_docstring():
    bare = [
        f"{path}.{name}"
        for path, name, value in _public()
        if not (callable(value) and value.__doc__) and not _told_below(name)
    ]
    assert bare == []


def _told_below(name: str) -> bool:
    """Whether some module tells what a value is, in a string below its assignment."""
    told = re.compile(
        rf"^{name}\b[^\n]*=(?:[^\n]*\n|.*?\n[)}}\]]\n)\"\"\"", re.MULTILINE | re.DOTALL
    )
    return any(told.search(path.read_text()) for path in (ROOT / "src").rglob("*.py"))
