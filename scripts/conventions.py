#!/usr/bin/env python3
"""Check conventions that no other tool knows: sizes, names, and what the documents say.

    scripts/conventions.py

Each check yields its faults, one line each; with any fault the command exits with 1. Rules about
what the code may do (imports, the environment, public names) are tests, in `tests/arch`.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

import dure
import dure.errors
from dure.torch_names import listed, table

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "dure"
FAULTS = Iterator[str]

# ---- sizes and names -----------------------------------------------------------------------------

MOST_LINES, MOST_FUNCTION_LINES, MOST_PARAMETERS = 1000, 80, 8
OF_TORCH = "the signature of torch's function or class of that name"
OF_TYPER = "typer reads the options of a command from its parameters"
MORE_PARAMETERS = {
    "init_process_group": OF_TORCH,
    "new_group": OF_TORCH,
    "async_save": OF_TORCH,
    "DistributedDataParallel.__init__": OF_TORCH,
    "SyncBatchNorm.__init__": OF_TORCH,
    "PowerSGDState.__init__": OF_TORCH,
    "PipelineStage.__init__": OF_TORCH,
    "PipelineScheduleMulti.__init__": OF_TORCH,
    "_Named.__init__": "the signature of torch's schedules that have a name",
    "DureError.__init__": "every field of an error, keyword-only",
    "layouts": OF_TYPER,
}
"""Functions with more parameters than others may have, and why."""

AT_PATHS_OF_TORCH = frozenset(table()["paths"])
"""Modules that import names from their homes; scripts/torch_names writes them."""


def of_torch(path: Path) -> bool:
    """Return whether the name of a module is torch's, and not ours."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name in AT_PATHS_OF_TORCH or listed(name) is not None


VAGUE = {"utils", "common", "helper", "helpers", "manager", "misc"}


def python_files(*folders: str) -> list[Path]:
    """Return the Python files below some folders of the repository, in order."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def cpp_files() -> list[Path]:
    """Return the C++ files, in order."""
    return sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cpp", ".h"})


@cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file once."""
    return ast.parse(path.read_text(), str(path))


def shown(path: Path, line: int = 0) -> str:
    """Name a place as editors do: path from the root, and line."""
    return f"{path.relative_to(ROOT)}:{line}" if line else str(path.relative_to(ROOT))


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(path: Path) -> Iterator[tuple[str, Function]]:
    """Yield every function of a file with its name; a method's name has its class's before it."""
    waiting: list[tuple[str, ast.AST]] = [("", tree_of(path))]
    for owner, node in waiting:
        if isinstance(node, Function):
            yield f"{owner}{node.name}", node
        inside = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += [(inside, child) for child in getattr(node, block, None) or ()]


def files_are_short() -> FAULTS:
    """Files have at most 1,000 lines."""
    for path in [*python_files("src", "examples", "benchmarks", "tests", "scripts"), *cpp_files()]:
        if (count := len(path.read_text().splitlines())) > MOST_LINES:
            yield f"{shown(path)}: {count} lines, at most {MOST_LINES}"


def functions_are_short() -> FAULTS:
    """Functions have at most 80 lines without their docstring, and at most 8 parameters."""
    for path in python_files("src", "examples", "benchmarks", "tests"):
        for name, node in functions_of(path):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                count -= (first.end_lineno or first.lineno) - first.lineno + 1
            if count > MOST_FUNCTION_LINES:
                where = shown(path, node.lineno)
                yield f"{where}: {name} has {count} lines, at most {MOST_FUNCTION_LINES}"


def parameter_lists_are_short() -> FAULTS:
    """Functions of the package have at most 8 parameters."""
    unused = set(MORE_PARAMETERS)
    for path in python_files("src"):
        for name, node in functions_of(path):
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            count = sum(a.arg not in {"self", "cls"} for a in given)
            if count <= MOST_PARAMETERS:
                continue
            if name not in MORE_PARAMETERS:
                where = shown(path, node.lineno)
                yield f"{where}: {name} has {count} parameters, at most {MOST_PARAMETERS}"
            unused.discard(name)
    for name in sorted(unused):
        yield f"{shown(Path(__file__))}: {name} has no more parameters than others may have"


def names_are_not_vague() -> FAULTS:
    """No module and no function is called `utils`, `helper` or the like."""
    for path in python_files("src"):
        if path.stem in VAGUE and not of_torch(path):
            yield f"{shown(path)}: a vague name"
        for _, node in functions_of(path):
            if node.name in VAGUE:
                yield f"{shown(path, node.lineno)}: {node.name} is a vague name"


SHARED_CLASS_NAMES, SHARED_IN_A_PACKAGE = 9, 1
"""How many class names are in two modules or more; how many of them in two modules of one package
(a folder of src/dure): `Backend`, which is public as a name and as an interface. Both only fall."""


def class_names_are_distinct() -> FAULTS:
    """Few modules have a class with the name of another module's."""
    homes: dict[str, list[Path]] = {}
    for path in python_files("src"):
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path.relative_to(PACKAGE))
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    near = {n: ps for n, ps in shared.items() if len({p.parts[0] for p in ps}) < len(ps)}
    for found, most in ((shared, SHARED_CLASS_NAMES), (near, SHARED_IN_A_PACKAGE)):
        if len(found) > most:
            for name, paths in sorted(found.items()):
                yield f"class {name}: {', '.join(map(str, paths))}"
            yield f"{len(found)} of these class names, at most {most}"


def modules_open_with_prose() -> FAULTS:
    """Each module begins with a docstring."""
    for path in python_files("src", "examples", "benchmarks"):
        if not ast.get_docstring(tree_of(path)):
            yield f"{shown(path)}: no docstring"


def examples_explain_themselves() -> FAULTS:
    """An example is short, begins with prose, and shows its command."""
    folder = ROOT / "examples"
    for path in sorted([*folder.glob("[0-9]*.py"), *folder.glob("recipes/*.py")]):
        lines = path.read_text().splitlines()
        if len(lines) >= 150:
            yield f"{shown(path)}: {len(lines)} lines, at most 149"
        if not any("dure run --nproc" in line and path.name in line for line in lines[:30]):
            yield f"{shown(path)}: the first 30 lines do not show its command"


def examples_are_listed() -> FAULTS:
    """examples/README.md has a line for every program."""
    folder = ROOT / "examples"
    text = (folder / "README.md").read_text()
    for path in sorted(folder.rglob("*.py")):
        if f"]({path.relative_to(folder)})" not in text:
            yield f"examples/README.md: no {path.relative_to(folder)}"


# ---- documents -----------------------------------------------------------------------------------

DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "ko").glob("*.md")),
]
TICKED = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"^(?:src|csrc|tests|docs|examples|benchmarks|scripts|\.ci)/[\w./-]+$")
CALL = re.compile(r"^(?:\w+(?:\.|::))*(\w+)\(\)$")
YAML = re.compile(r"^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
YAML_LINE = re.compile(r"(?:  )*(?:(?:- )?[\w.]+:(?: .+)?|- \{ .* \}|---|\w[\w ./~-]*)$")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")
COMMENT = re.compile(r"[ \t]*#.*$", re.MULTILINE)
NOT_RUN = re.compile(r"^<!-- not run:(.*?)-->$", re.MULTILINE | re.DOTALL)


def names_in_documents_exist() -> FAULTS:
    """Paths, links and functions that a document names exist."""
    sources = "\n".join(path.read_text() for path in (*python_files("src"), *cpp_files()))
    words = set(re.findall(r"\w+", sources))
    for document in DOCUMENTS:
        text = FENCE.sub("", document.read_text())
        for target in LINK.findall(text):
            if not (document.parent / target).exists():
                yield f"{shown(document)}: there is no {target}"
        for word in TICKED.findall(text):
            called = CALL.match(word)
            if PATH.match(word) and not (ROOT / word.rstrip("/")).exists():
                yield f"{shown(document)}: there is no {word}"
            if called and called.group(1) not in words:
                yield f"{shown(document)}: there is no function {word}"


KOREAN_ONLY = {"pytorch_tutorials.md"}
"""Korean pages without an English one; tests/docs runs their blocks."""
SHORTER = {"checkpoint.md", "fsdp.md", "launch.md"}
"""Korean pages that leave out blocks of their English page, or have them in another order."""
WITHOUT_CODE = {"glossary.md"}


def translations_show_the_same_code() -> FAULTS:
    """A translation has the blocks of its English page, except for comments."""
    pages = [(path.parents[1] / path.name, path) for path in sorted(ROOT.glob("docs/ko/*.md"))]
    for pair in [(ROOT / "README.md", ROOT / "README.ko.md"), *pages]:
        name = pair[1].name
        if name in KOREAN_ONLY:
            continue
        english, korean = (
            [COMMENT.sub("", b) for b in FENCE.findall(path.read_text()) if b[3:7] != "text"]
            for path in pair
        )
        if name in SHORTER:
            english = [block for block in korean if block in english]
        if english != korean or bool(korean) == (name in WITHOUT_CODE):
            yield f"{shown(pair[1])}: its code is not that of {shown(pair[0])}"


def translations_link_to_translations() -> FAULTS:
    """A Korean page links to Korean pages where they exist; the English page is linked once."""
    names = {path.name for path in ROOT.glob("docs/ko/*.md")}
    for path in sorted(ROOT.glob("docs/ko/*.md")):
        for target in re.findall(r"\]\(\.\./([\w.]+)\)", FENCE.sub("", path.read_text())):
            if target in names - {path.name}:
                yield f"{shown(path)}: links to docs/{target}, and docs/ko/{target} exists"


def every_error_is_explained() -> FAULTS:
    """Every class of `dure.errors` is in docs/errors.md."""
    text = (ROOT / "docs" / "errors.md").read_text()
    yield from (f"docs/errors.md: no {n}" for n in dure.errors.__all__ if n not in text)


SECTION = r"(?:Collective|Cost|Numerics|Threads|Shapes)"
SECTION_IN_ONE_LINE = re.compile(rf"^ *{SECTION}(?:, {SECTION})*: \S")
NOTES_TO_CHECKERS = ("(Any: ", "see the head of this file")


def docstrings_have_one_form() -> FAULTS:
    """Sections such as Cost have a line for their name; no note is for a checker of types."""
    for path in python_files("src"):
        lines = path.read_text().splitlines()
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, documented) and ast.get_docstring(node, clean=False):
                first, last = node.body[0].lineno, node.body[0].end_lineno
                for number, line in enumerate(lines[first - 1 : last], first):
                    if SECTION_IN_ONE_LINE.match(line) or any(n in line for n in NOTES_TO_CHECKERS):
                        yield f"{shown(path, number)}: {line.strip()}"


def yaml_in_documents_is_well_formed() -> FAULTS:
    """Blocks of YAML have no slip of the hand; this is not a reader of YAML."""
    for document in DOCUMENTS:
        for block in YAML.findall(document.read_text()):
            for line in filter(str.strip, block.splitlines()):
                closed = line.count('"') % 2 == 0
                closed &= all(line.count(a) == line.count(b) for a, b in ("{}", "[]"))
                if not (YAML_LINE.match(line) and closed):
                    yield f"{shown(document)}: {line}"


def code_that_is_not_run_says_why() -> FAULTS:
    """A block that no test runs has a reason of three words or more."""
    for document in DOCUMENTS:
        for reason in NOT_RUN.findall(document.read_text()):
            if len(reason.split()) < 3:
                yield f"{shown(document)}: a block is not run, and the reason is {reason!r}"


# ---- the reference -------------------------------------------------------------------------------

ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
WITHOUT_ENTRY = {
    "cli": "commands, which have pages",
    "env": "variables are documented where they matter",
    "errorfile": "its `record` is dure's",
    "layout": "arithmetic below the mesh",
    "mesh": "its names are those of dure.device_mesh",
    "native": "the engine, for comm and rpc alone",
    "parallel": "its names are dure's, and those of torch's paths",
    "placement": "what `dure run` finds out",
    "rendezvous": "its names are dure's",
    "run": "torchrun's functions by name",
    "store": "its names are dure's",
    "torch_names": "answers missing names",
}
"""Modules that list names but have no entry, and why."""
AS_IN_TORCH = (
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
"""Modules below those of dure that have torch's names: public, too."""


def _public_names() -> list[tuple[str, str, object]]:
    """Return (module, name, value) of all public names."""
    found = [m.name for m in pkgutil.iter_modules(dure.__path__) if not m.name.startswith("_")]
    assert set(WITHOUT_ENTRY) <= set(found), "a module that has no entry is gone"
    found = [name for name in found if name not in AT_PATHS_OF_TORCH and not listed(name)]
    wanted = [name for name in [*found, *AS_IN_TORCH] if name not in WITHOUT_ENTRY]
    names: list[tuple[str, str, object]] = []
    for path in ["dure", *(f"dure.{name}" for name in wanted)]:
        module = importlib.import_module(path)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if not name.startswith("_") and not isinstance(value, ModuleType):
                names.append((path, name, value))
    return names


def _named(path: str) -> object:
    """Return the module or the value at a dotted path, or None."""
    package, _, name = path.rpartition(".")
    with suppress(ModuleNotFoundError):
        value = getattr(importlib.import_module(package), name, None)
        return importlib.import_module(path) if value is None else value
    return None


def public_names_are_in_the_reference() -> FAULTS:
    """Every public name has a docstring and an entry in docs/reference; each entry exists."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    entries = {entry for page in pages for entry in ENTRY.findall(page.read_text())}
    names, sources = _public_names(), [path.read_text() for path in python_files("src")]
    yield from (f"docs/reference: there is no {e}" for e in sorted(entries) if _named(e) is None)
    listed = {id(value) for path, _, value in names if path in entries}
    listed |= {id(_named(entry)) for entry in entries}
    for path, name, value in names:
        if id(value) not in listed:
            yield f"docs/reference: no entry of {path}.{name}"
        below = re.compile(rf'^{name}\b[^\n]*=(?:[^\n]*\n|.*?\n[)}}\]]\n)"""', re.M | re.S)
        if not (callable(value) and value.__doc__) and not any(map(below.search, sources)):
            yield f"{path}.{name}: no docstring"


CHECKS: list[Callable[[], FAULTS]] = [
    files_are_short,
    functions_are_short,
    parameter_lists_are_short,
    names_are_not_vague,
    class_names_are_distinct,
    modules_open_with_prose,
    examples_explain_themselves,
    examples_are_listed,
    names_in_documents_exist,
    translations_show_the_same_code,
    translations_link_to_translations,
    every_error_is_explained,
    docstrings_have_one_form,
    yaml_in_documents_is_well_formed,
    code_that_is_not_run_says_why,
    public_names_are_in_the_reference,
]


def main() -> int:
    """Print all faults; return 1 if there are any."""
    faults = [(check.__name__, fault) for check in CHECKS for fault in check()]
    for name, fault in faults:
        print(f"{fault} ({name})")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
