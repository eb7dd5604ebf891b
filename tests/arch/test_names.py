"""Every public name has one home, and exists there."""

import ast
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
