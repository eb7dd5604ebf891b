"""What a program will import, found by reading it."""

from pathlib import Path

import pytest

from dure.launch import JobSpec
from dure.launch.ranks.imports import names_to_import, variable_set_first


def found(directory: Path, text: str, **files: str) -> tuple[str, ...]:
    """Write a program, and files beside it (`a_in_b` is b/a.py), and return what it will import."""
    for name, content in files.items():
        inner, _, package = name.partition("_in_")
        path = directory / package / f"{inner}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    program = directory / "program.py"
    program.write_text(text)
    return names_to_import(JobSpec(program=str(program)))


DYNAMO = ("torch", "torch._dynamo")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch", ("torch",)),
        ("import os, torch.nn as nn", ("torch", "torch.nn")),
        ("try:\n    import torch\nexcept ImportError:\n    pass", ("torch",)),
        ("if True:\n    with open('x'):\n        from torch import nn", ("torch",)),
        ("", ()),
        ("print('import torch')", ()),
        ("# import torch", ()),
        ("def f(:", ()),
        ("from dure.launch import run_job", ()),
        ("import torchlike_name, no_such_module_anywhere", ()),
        ("import torch\ntorch.optim.SGD", DYNAMO),
        ("from torch import optim\noptim.SGD", DYNAMO),
        ("from torch.optim import SGD", ("torch", "torch.optim", "torch._dynamo")),
        ("import torch\nfrom mine import optim\noptim.SGD", ("torch",)),
        # a module of torch that reads such a variable is left to the ranks
        ("import torch\nos.environ['TORCHDYNAMO_VERBOSE'] = '1'\ntorch.optim.SGD", ("torch",)),
        ("import torch\nos.environ['TORCH_LOGS'] = '1'\nimport torch._dynamo", ("torch",)),
    ],
)
def test_imports_of_torch_are_found(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    assert found(tmp_path, text) == names


def test_files_beside_the_program_are_followed_and_circles_end(tmp_path: Path) -> None:
    files = {"first": "import second", "second": "import first\nfrom package import deep"}
    files |= {"__init___in_package": "", "deep_in_package": "from . import deeper"}
    files["module_in_namespace"] = "x = 1"
    assert found(tmp_path, "import first, namespace.module", **files) == ()
    files["module_in_namespace"] = "import torch"
    assert found(tmp_path, "import first, namespace.module", **files) == ("torch",)
    files |= {"module_in_namespace": "", "deeper_in_package": "from torch import nn"}
    assert found(tmp_path, "import first", **files) == ("torch",)


def test_names_used_of_dure_are_loaded_with_it(tmp_path: Path) -> None:
    names = found(tmp_path, "import dure as dist, torch.utils.data\ndist.broadcast(1)")
    assert names[:2] == ("torch", "torch.utils.data")
    assert {"dure:broadcast", "dure:init_process_group"} <= set(names)


def test_module_is_found_from_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found(tmp_path, "", __init___in_package="", tool_in_package="from .other import x")
    (tmp_path / "package" / "other.py").write_text("import torch")
    (tmp_path / "package" / "__main__.py").write_text("import os")
    monkeypatch.chdir(tmp_path)
    assert names_to_import(JobSpec(program="package.tool", kind="module")) == ("torch",)
    assert names_to_import(JobSpec(program="package", kind="module")) == ()
    assert names_to_import(JobSpec(program="package.gone", kind="module")) == ()


@pytest.mark.parametrize(
    ("text", "variable"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '2'\nimport torch", "OMP_NUM_THREADS"),
        ("os.environ.update(PYTORCH_JIT='0')\nfrom model import Net", "PYTORCH_JIT"),
        ("del os.environ[b'TORCH_LOGS']\ndef f():\n    import os, torch.nn", "TORCH_LOGS"),
        ("import torch\nos.environ['OMP_NUM_THREADS'] = '2'", ""),
        ("print(os.environ['TORCHELASTIC_RUN_ID'], 'DOMP_X')\nimport torch", ""),
        ("no Python", ""),
    ],
)
def test_a_variable_for_torch_named_before_its_import_is_found(
    tmp_path: Path, text: str, variable: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    assert variable_set_first(JobSpec(program=str(program))) == variable
