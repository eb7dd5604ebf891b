"""The typed stub of the native extension says what the extension has, no more and no less."""

import ast
import importlib
import sys

import pytest

from tests.arch.sources import PACKAGE

STUB = PACKAGE / "native" / "_engine.pyi"


def _public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def _declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Map the names that a stub, or a class in it, declares to their declarations."""
    out: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            out[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            out[node.target.id] = node
    return {name: node for name, node in out.items() if not name.startswith("_")}


@pytest.fixture(scope="module")
def engine():
    if sys.platform != "linux":
        pytest.skip("needs Linux: the native engine is for it")
    return importlib.import_module("dure.native._engine")


def test_stub_declares_what_the_extension_has(engine):
    declared = _declared(ast.parse(STUB.read_text()).body)
    assert set(declared) == _public(vars(engine))


def test_stub_declares_the_members_of_every_class(engine):
    declared = _declared(ast.parse(STUB.read_text()).body)
    for name, node in declared.items():
        if isinstance(node, ast.ClassDef):
            assert set(_declared(node.body)) == _public(vars(getattr(engine, name))), name


def test_stub_matches_the_number_of_arguments(engine):
    for name, node in _declared(ast.parse(STUB.read_text()).body).items():
        if isinstance(node, ast.FunctionDef):
            shown = getattr(engine, name).__doc__.splitlines()[0]
            inner = ast.parse(f"def {shown}: ...").body[0]
            assert isinstance(inner, ast.FunctionDef)
            assert len(inner.args.args) == len(node.args.args), shown


def test_door_exports_names_that_exist():
    door = importlib.import_module("dure.native")
    importlib.import_module("dure.native._engine")
    assert [name for name in door.__all__ if not hasattr(door, name)] == []
