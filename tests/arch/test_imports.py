"""What may be imported, read, or included where."""

import ast
import re
import tomllib

from dure.env import VARIABLES
from dure.torch_names import table
from tests.arch.sources import (
    CSRC,
    PACKAGE,
    ROOT,
    cpp_files,
    functions_of,
    imports_of,
    lines_of,
    python_files,
    shown,
    tree_of,
)

MAY_IMPORT_TORCH_DISTRIBUTED = {
    PACKAGE / "comm" / "backends" / "torch_engine.py",
    *(PACKAGE / "torch_backend").glob("*.py"),
    PACKAGE / "checkpoint" / "torch_writing.py",  # writes torch's checkpoints, for `convert`
    PACKAGE / "cli" / "bench" / "rank.py",  # as the rival of a benchmark, and nothing else
    PACKAGE / "torch_private.py",  # has `c10d` for those above
    PACKAGE / "tensor" / "debug.py",  # counts under the names of operators that torch defines there
    *(  # parts of torch that know nothing of process groups, at torch's paths
        PACKAGE / f"{path.replace('.', '/')}.py"
        for path, homes in table()["paths"].items()
        if any(home.startswith("torch.") for home in homes)
    ),
}
IMPORT_NOTHING_OF_DURE = {PACKAGE / "launch" / "ranks" / n for n in ("forking.py", "child.py")} | {
    PACKAGE / "torch_backend" / "__init__.py"  # `import torch` imports it in every program
}
"""They begin a rank, and put the environment of a forked one in place."""
REASON = re.compile(r"#\s*lazy: \S")
FOREIGN_HEADER = re.compile(r'#\s*include\s*[<"](Python\.h|nanobind/|torch/|ATen/|c10/|pybind11/)')


def test_torch_distributed_is_used_only_by_adapter_plug_in_and_benchmark():
    used = ("torch.distributed", "torch._C._distributed", "dure.torch_private.c10d")
    offenders = [
        shown(path, line)
        for path in python_files()
        if path not in MAY_IMPORT_TORCH_DISTRIBUTED
        for name, line in [*imports_of(path), *_attributes_of(path)]
        if name.startswith(used)
    ]
    assert not offenders, f"only {MAY_IMPORT_TORCH_DISTRIBUTED} may import torch.distributed"


def _attributes_of(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}", node.lineno


def test_native_extension_is_imported_only_inside_native():
    offenders = [
        shown(path, line)
        for path in python_files()
        if PACKAGE / "native" not in path.parents
        for name, line in imports_of(path)
        if name.startswith("dure.native._")
    ]
    assert not offenders


def test_native_core_includes_neither_python_nor_torch():
    files = cpp_files(CSRC / "core")
    assert files
    offenders = [
        shown(path, number)
        for path in files
        for number, line in enumerate(lines_of(path), 1)
        if FOREIGN_HEADER.search(line)
    ]
    assert not offenders


def test_environment_is_read_only_in_env():
    offenders = [
        shown(path, node.lineno)
        for path in python_files()
        if path not in {PACKAGE / "env.py", *IMPORT_NOTHING_OF_DURE}
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"})
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and _names_environ(node))
    ]
    assert not offenders, "declare the variable in dure.env and read it with dure.env.text()"


def test_variables_read_before_dure_can_be_imported_are_declared_in_env():
    named = {
        argument.value: shown(path, node.lineno)
        for path in IMPORT_NOTHING_OF_DURE
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"os.environ.get", "os.getenv"}
        for argument in node.args[:1]
        if isinstance(argument, ast.Constant)
    }
    assert "DURE_TRACEBACK" in named
    assert {name: place for name, place in named.items() if name not in VARIABLES} == {}


def _names_environ(node: ast.ImportFrom) -> bool:
    return any(alias.name in {"environ", "environb", "getenv"} for alias in node.names)


def test_imports_inside_functions_give_their_reason():
    offenders = []
    for path in python_files():
        lines = lines_of(path)
        for function in functions_of(path):
            for node in ast.walk(function):
                if not isinstance(node, ast.Import | ast.ImportFrom):
                    continue
                near = lines[node.lineno - 2 : node.end_lineno]
                if not any(REASON.search(line) for line in near):
                    offenders.append(shown(path, node.lineno))
    assert not sorted(set(offenders)), "move it to the top, or say why: `# lazy: reason`"


IMPORTED_AS = {"pyzmq": "zmq"}


def test_every_requirement_of_the_package_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    imported = {name.partition(".")[0] for path in python_files() for name, _ in imports_of(path)}
    assert {IMPORTED_AS.get(name, name) for name in names} <= imported
