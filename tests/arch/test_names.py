"""Every public name has one home, and exists there."""

import ast
import importlib
from collections import Counter

import dure
from dure import errors
from tests.arch.sources import python_files, shown, tree_of


def test_public_names_have_one_home():
    counted = Counter(name for names in dure._HOMES.values() for name in names)
    assert [name for name, count in counted.items() if count > 1] == []
    for name in dure.__all__:
        assert getattr(dure, name) is not None
    assert set(dure.__all__) <= set(dir(dure))


def test_modules_all_name_what_they_define():
    unknown = []
    for path in python_files():
        tree = tree_of(path)
        defined = _defined(tree)
        unknown += [f"{shown(path)} {n}" for n in _listed(tree) if n not in defined]
    assert unknown == []


def _listed(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            return ast.literal_eval(node.value) if isinstance(node.value, ast.List) else []
    return []


def _defined(tree: ast.Module) -> set[str]:
    out: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                out.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                out.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                out |= {alias.asname or alias.name for alias in names}
            case _:
                pass
    return out


def test_paths_of_torch_lead_to_the_same_names():
    for path, name in (
        ("algorithms", "Join"),
        ("algorithms.join", "Join"),
        ("algorithms.ddp_comm_hooks.ddp_zero_hook", "hook_with_zero_step"),
        ("algorithms.ddp_comm_hooks.default_hooks", "fp16_compress_hook"),
        ("algorithms.ddp_comm_hooks.post_localSGD_hook", "PostLocalSGDState"),
        ("algorithms.ddp_comm_hooks.powerSGD_hook", "PowerSGDState"),
        ("algorithms.model_averaging.averagers", "PeriodicModelAverager"),
        ("algorithms.model_averaging.hierarchical_model_averager", "HierarchicalModelAverager"),
        ("optim", "ZeroRedundancyOptimizer"),
    ):
        assert getattr(importlib.import_module(f"dure.{path}"), name) is getattr(dure, name)


def test_warnings_have_a_class_of_dures_tree():
    ours = {
        name for name in errors.__all__ if issubclass(getattr(errors, name), errors.DureWarning)
    }
    calls = [
        (shown(path, node.lineno), {a.id for a in node.args if isinstance(a, ast.Name)})
        for path in python_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and _called(node) in {"warn", "warn_explicit"}
    ]
    assert len(calls) > 10
    assert [place for place, names in calls if not names & ours] == []


def _called(call: ast.Call) -> str:
    """Return the name of a function of `warnings` that is called, and "" of any other."""
    match call.func:
        case ast.Attribute(value=ast.Name(id="warnings"), attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""
