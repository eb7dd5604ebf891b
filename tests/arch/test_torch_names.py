"""torch's public names: each exists at its path, with torch's arguments, or is listed."""

import enum
import importlib
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed

import dure
from dure.torch_names import listed, table
from tests.arch.sources import ROOT, script

TORCH = Path(torch.distributed.__file__).parent
PRIVATE = ("_functional_collectives", "_symmetric_memory", "_tensor", "_composable")
PRIVATE += ("algorithms._checkpoint.checkpoint_wrapper",)
"""The modules with an underscore in their path whose names are compared."""

NOT_AS_IN_TORCH = {
    # Objects that only Dure makes.
    "api.CheckpointException": "errors have Dure's fields",
    "errors.ChildFailedError": "is LaunchError",
    "errors.ChildFailedError.": "is LaunchError",
    "Pipe": "made by `pipeline`",
    "UnshardHandle": "made by `FSDPModule.unshard`",
    "state_dict_saver.AsyncSaveResponse": "made by `async_save`",
    # Methods by which torch's own classes call each other.
    "FileSystemWriter.": "`save` reads its fields",
    "HuggingFaceStorageWriter.": "`save` reads its fields",
    "PipelineStage.": "called by torch's schedules; Dure's executor calls others",
    "Pipe.": "made by `pipeline`",
    "ProcessGroup.": "those that torch's C++ calls",
    "Store.": "those that torch's C++ calls",
    # Arguments.
    "LoadPlanner.finish_plan": "the name that torch's DefaultLoadPlanner has",
    "BroadcastingTorchSaveReader.prepare_global_plan": "the name that torch's StorageReader has",
    "_functional_collectives.": "the tensor is called `tensor`, not `self`",
    "FSDPModule.set_symm_mem_for_comm": "the backend is the group's, not NCCL",
}
"""What differs from torch's signatures: the end of a path, with "." of what is below it."""


def _ours(path: str) -> str:
    return f"dure.{path}".rstrip(".")


def modules_of_torch() -> Iterator[str]:
    yield ""
    for file in sorted(TORCH.rglob("*.py")):
        path = ".".join(file.relative_to(TORCH).with_suffix("").parts).removesuffix(".__init__")
        hidden = path.startswith("_") or "._" in path
        if path != "__init__" and (path in PRIVATE or not hidden) and not listed(path):
            yield path


@cache
def pairs() -> list[tuple[str, ModuleType, ModuleType | None, list[str]]]:
    """Return (path, torch's module, Dure's, torch's public names) of the modules."""
    found = []
    for path in modules_of_torch():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = importlib.import_module(f"torch.distributed.{path}".rstrip("."))
            names = public_names(theirs)
        try:
            ours = importlib.import_module(_ours(path))
        except ModuleNotFoundError:
            ours = None
        found.append((path, theirs, ours, names))
    return found


def public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if hasattr(module, name)]
    its = (module.__name__,)
    if module is torch.distributed:  # it imports what it offers
        its = ("torch.distributed", "torch._C._distributed_c10d")
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith(its)
        if len(its) > 1 or value.__module__ == module.__name__
    ]


def test_public_names_of_torch_exist_or_are_listed():
    missing = []
    for path, _, ours, names in pairs():
        wanted = [name for name in names if not listed(path, name)]
        if ours is None:
            missing += [f"{path}.{name}" for name in wanted]
        else:
            missing += [f"{path}.{name}" for name in wanted if not hasattr(ours, name)]
    assert missing == [], "add them, or list them in src/dure/torch_names.toml"


def test_names_that_are_listed_exist_in_torch():
    unknown = []
    for row in table()["listed"]:
        for path in row["module"].split():
            file = TORCH / path.replace(".", "/")
            if not (file.is_dir() or file.with_suffix(".py").exists()):
                unknown.append(path)
            elif row["names"] != "*":
                theirs = importlib.import_module(f"torch.distributed.{path}".rstrip("."))
                plain = [name for name in row["names"].split() if "*" not in name]
                unknown += [f"{path}.{name}" for name in plain if not hasattr(theirs, name)]
    assert unknown == []


def test_a_listed_name_raises_an_import_error_with_its_replacement():
    for row in table()["listed"]:
        use = re.sub(r"\[(.+?)\]\(.+?\)", r"docs/\1", row["use"])
        for path in row["module"].split():
            for name in row["names"].split():
                statement = f"from {_ours(path)} import {name.replace('*', 'any')}"
                if name == "*":
                    statement = f"from {_ours(path)}.below import any"
                with pytest.raises(ImportError) as caught:
                    exec(statement)
                assert use in str(caught.value)
                assert "](" not in str(caught.value)
            if row["names"] != "*":
                ours = importlib.import_module(_ours(path))
                shown = {*dir(ours), *getattr(ours, "__all__", ())}
                assert not shown & set(row["names"].split())


@pytest.mark.parametrize("path", ["dure", "dure.fsdp", "dure.rpc", "dure.elastic", "dure.launch"])
def test_a_name_that_nobody_has_is_an_attribute_error(path: str):
    module = importlib.import_module(path)
    with pytest.raises(AttributeError):
        _ = module.no_such_name
    assert not hasattr(module, "no_such_name")
    with pytest.raises(ImportError, match="no_such_name"):
        exec(f"from {path} import no_such_name")


SUBMODULES = """
import sys
import dure as dist

assert dist.launch.agent and dist.trace and dist.store
assert "torch" not in sys.modules
assert dist.optim.utils and dist.nn.api and dist.symmetric_memory
assert dist.rpc.rpc_sync and dist.algorithms.ddp_comm_hooks.powerSGD_hook
import dure.rendezvous  # an attribute of `dure`, as the function is

store, rank, world_size = next(dist.rendezvous("file://" + sys.argv[1], 0, 1))
assert (rank, world_size) == (0, 1)
"""


def test_submodules_are_attributes_without_another_import(tmp_path: Path):
    store = str(tmp_path / "store")
    subprocess.run([sys.executable, "-c", SUBMODULES, store], check=True)


@pytest.mark.parametrize("name", ["torch_names", "public_names"])
def test_modules_and_document_are_what_the_table_says(name: str):
    assert list(script(f"scripts/{name}").faults(write=False)) == []


def test_type_checkers_do_not_see_that_modules_have_a_getattr():
    shown = [
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"^(__getattr__|def __getattr__)\b", path.read_text(), re.MULTILINE)
    ]
    assert not shown, "a type checker accepts every name of them; see dure.torch_names"


# ---- signatures ----------------------------------------------------------------------------------

P = inspect.Parameter
POSITIONAL = (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)


def test_signatures_are_those_of_torch():
    seen: set[int] = set()
    found = []
    for path, theirs, ours, names in pairs():
        for name in names:
            if ours is None or listed(path, name) or not hasattr(theirs, name):
                continue
            a, b = getattr(theirs, name), getattr(ours, name, None)
            if id(a) in seen or a is b or inspect.ismodule(b):
                continue  # `rendezvous` is a module, too
            if callable(a) and b is not None:
                seen.add(id(a))
                found += _differences(f"{path}.{name}", a, b)
    for a, b in (
        (torch.nn.parallel.DistributedDataParallel, dure.DistributedDataParallel),
        (torch.nn.SyncBatchNorm, dure.SyncBatchNorm),
        (torch.utils.data.DistributedSampler, dure.DistributedSampler),
    ):
        found += _differences(f".{b.__name__}", a, b)
    assert [fault for fault in found if not _is_known(fault)] == []


def _is_known(fault: str) -> bool:
    where = fault.split(":", maxsplit=1)[0]
    return any(
        where.endswith(f".{end}") or (end.endswith(".") and f".{end}" in f".{where}")
        for end in NOT_AS_IN_TORCH
    )


def _differences(where: str, a: Any, b: Any) -> Iterator[str]:
    if inspect.isclass(a) and issubclass(a, enum.Enum):
        if lacks := set(a.__members__) - set(b.__members__):
            yield f"{where}: no {sorted(lacks)}"
        return
    yield from _differing_arguments(where, a, b)
    for name in vars(a) if inspect.isclass(a) else ():
        method = inspect.getattr_static(a, name)
        if isinstance(method, staticmethod | classmethod):
            method = method.__func__
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        if hasattr(b, name):
            yield from _differing_arguments(f"{where}.{name}", method, getattr(b, name))
        else:
            yield f"{where}.{name}: missing"


def _differing_arguments(where: str, a: Any, b: Any) -> Iterator[str]:
    try:
        theirs, ours = _parameters(a), _parameters(b)
    except (TypeError, ValueError):  # C++
        return
    if any(p.kind == P.VAR_POSITIONAL for p in theirs) and not any(
        p.kind == P.KEYWORD_ONLY for p in theirs
    ):  # a wrapper of C++, or of anything
        return
    by_name = {p.name: p for p in ours}
    any_name = any(p.kind == P.VAR_KEYWORD for p in ours)
    order = [p.name for p in ours if p.kind in POSITIONAL]
    for number, p in enumerate(p for p in theirs if p.kind in POSITIONAL):
        if not p.name.startswith("_") and order[number : number + 1] != [p.name]:
            yield f"{where}: argument {number} is not {p.name}"
    for p in theirs:
        if p.name not in by_name:
            if p.kind == P.KEYWORD_ONLY and not p.name.startswith("_") and not any_name:
                yield f"{where}: no {p.name}="
        elif not _same(p.default, by_name[p.name].default):
            yield f"{where}: {p.name}={p.default!r} is {by_name[p.name].default!r}"
    for p in ours:
        if p.default is P.empty and p.kind in POSITIONAL and p.name not in {t.name for t in theirs}:
            yield f"{where}: {p.name} must be given"


def _parameters(function: Any) -> list[inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    return found[1:] if found and found[0].name in {"self", "cls"} else found


def _same(theirs: Any, ours: Any) -> bool:
    """Return whether defaults are equal; None may stand for an object, or for no default."""
    if theirs is P.empty:
        return True
    plain = isinstance(theirs, bool | int | float | str | type(None))
    if plain:
        return bool(theirs == ours) or (theirs is None and repr(ours) == "<factory>")
    return ours is None or str(ours).rsplit(".", 1)[-1] == str(theirs).rsplit(".", 1)[-1]
