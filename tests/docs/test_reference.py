"""Public names have examples in their docstrings; test_snippets.py runs them.

The names are those of src/dure/public.txt. A name at several paths counts once, and torch's own
objects do not count. The errors of `dure.errors` have one page of examples, docs/errors.md.
"""

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

from dure.torch_names import public
from tests.arch.sources import PACKAGE
from tests.docs.snippets import ROOT

EXAMPLE = "```python"
SOURCE = re.compile(r"^ *Obtained from:\n +\S", re.MULTILINE)
"""The section of a class that programs receive and do not make: the calls that return it."""

CLASSES_WITHOUT = 0
"""How many public classes say neither how to make one nor where to get one. It only falls."""


@cache
def _public() -> dict[str, Any]:
    """Return Dure's public functions and classes by the path of their definition."""
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old paths of torch
        for path in public():
            file = PACKAGE.parent / path.replace(".", "/")
            if file.is_dir() or file.with_suffix(".py").exists():
                module = importlib.import_module(path)
                values = [getattr(module, name) for name in module.__all__]
            else:
                home, _, name = path.rpartition(".")
                values = [getattr(importlib.import_module(home), name)]
            for value in values:
                name = getattr(value, "__qualname__", "")  # modules, which may be called, have none
                if name and str(value.__module__).partition(".")[0] == "dure":
                    found[f"{value.__module__}.{name}"] = value
    return found


def _without(values: dict[str, Any]) -> Iterator[str]:
    for path, value in values.items():
        text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        if EXAMPLE not in (text or "") and not SOURCE.search(text or ""):
            yield path


def test_every_public_function_has_an_example():
    functions = {p: v for p, v in _public().items() if callable(v) and not inspect.isclass(v)}
    assert {"dure.comm.collectives.all_reduce", "dure.launch.job.run_job"} <= set(functions)
    assert list(_without(functions)) == []


def test_public_classes_say_how_to_make_one_or_where_to_get_one():
    classes = {
        path: value
        for path, value in _public().items()
        if inspect.isclass(value) and not issubclass(value, BaseException)
    }
    assert {"dure.store.file.FileStore", "dure.comm.work.Work"} <= set(classes)
    without = sorted(_without(classes))
    assert len(without) == CLASSES_WITHOUT, without


def test_errors_are_caught_on_their_page():
    text = (ROOT / "docs" / "errors.md").read_text()
    block = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    assert {"UsageError", "CommError"} <= set(re.findall(r"except dist\.(\w+)", block))
