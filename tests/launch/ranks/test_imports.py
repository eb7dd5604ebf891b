"""What a program will import, found by reading it."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "import os, torch.nn as nn",
        "from torch import nn",
        "try:\n    import torch\nexcept ImportError:\n    pass",
        "def main():\n    import torch\nmain()",
        "if True:\n    with open('x'):\n        from torch.nn import Linear",
    ],
)
def test_torch_is_found_wherever_the_program_imports_it(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text)[0] == "torch"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import os, json",
        "print('import torch')",
        "# import torch",
        "def f(:",
        "import no_such_module_anywhere",
        "from dure.launch import run_job",
        "import torchlike_name_that_is_not_there",
        "import pytest",
    ],
)
def test_program_without_torch_needs_nothing(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text) == ()


def test_files_beside_the_program_are_followed_and_circles_end(tmp_path: Path) -> None:
    files = {"first": "import second", "second": "import first\nfrom package import deep"}
    files |= {"__init___in_package": "", "deep_in_package": "from . import deeper"}
    assert found(tmp_path, "import first", **files) == ()
    files["deeper_in_package"] = "from torch import nn"
    assert found(tmp_path, "import first", **files)[0] == "torch"


@pytest.mark.parametrize("text", ["from lib.sub.module import x", "from lib import sub"])
def test_packages_without_an_init_file_are_searched(tmp_path: Path, text: str) -> None:
    (tmp_path / "lib/sub").mkdir(parents=True)
    (tmp_path / "lib/sub/module.py").write_text("x = 1")
    assert found(tmp_path, text) == ()
    (tmp_path / "lib/sub/module.py").write_text("import torch\nx = 1")
    assert found(tmp_path, text) == ("torch",)


def test_names_used_of_dure_are_loaded_with_it(tmp_path: Path) -> None:
    names = found(tmp_path, "import dure as dist, torch.utils.data\ndist.broadcast(1)")
    assert names[:2] == ("torch", "torch.utils.data")
    assert {"dure:broadcast", "dure:init_process_group"} <= set(names)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.optim.SGD",
        "from torch import optim\noptim.SGD",
        "import torch.optim as o",
        "from torch.optim import SGD",
        "from torch.optim.lr_scheduler import StepLR",
    ],
)
def test_program_with_an_optimizer_needs_what_optimizers_import(tmp_path: Path, text: str) -> None:
    assert "torch._dynamo" in found(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nself.optim.step()",
        "import torch\nfrom mine import optim\noptim.SGD",
        "import torch\nos.environ['TORCHDYNAMO_VERBOSE'] = '1'\ntorch.optim.SGD",
        "import torch\nos.environ.update(found)\ntorch.optim.SGD",
        "from torch import optim\ndef main():\n    os.putenv('TORCH_LOGS', '+dynamo')",
        "import torch\nos.environ['TORCHINDUCTOR_X'] = '1'\nimport torch._inductor.config",
    ],
)
def test_program_without_one_or_with_variables_for_it_imports_that_itself(
    tmp_path: Path, text: str
) -> None:
    assert found(tmp_path, text) == ("torch",)


def test_computed_import_may_be_of_dure(tmp_path: Path) -> None:
    text = "import importlib, sys, torch\nimportlib.import_module(sys.argv[1])"
    assert "dure:init_process_group" in found(tmp_path, text)
    assert found(tmp_path, "import torch") == ("torch",)


def test_module_is_found_from_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found(tmp_path, "", __init___in_package="", tool_in_package="from .other import x")
    (tmp_path / "package" / "other.py").write_text("import torch")
    (tmp_path / "package" / "__main__.py").write_text("import os")
    monkeypatch.chdir(tmp_path)
    assert names_to_import(JobSpec(program="package.tool", kind="module")) == ("torch",)
    assert names_to_import(JobSpec(program="package", kind="module")) == ()
    assert names_to_import(JobSpec(program="package.gone", kind="module")) == ()


def test_own_module_called_torch_is_left_to_the_ranks(tmp_path: Path) -> None:
    assert found(tmp_path, "import torch", torch="import os\nRANK = os.environ['RANK']") == ()
    (tmp_path / "torch.py").unlink()
    (tmp_path / "torch").mkdir()  # data: a folder without __init__.py gives way to a package
    assert found(tmp_path, "import torch") == ("torch",)


@pytest.mark.parametrize(
    ("text", "variable"),
    [
        (
            ("os.environ['OMP_NUM_THREADS'] = '2'\nimport torch"),
            "OMP_NUM_THREADS",
        ),
        (
            ("import os, numpy\nif True:\n    os.environ.setdefault('MKL_DEBUG_CPU_TYPE', '5')"),
            "MKL_DEBUG_CPU_TYPE",
        ),
        (
            (
                "from os import environ\n"
                "environ.update({'TORCH_LOGS': '+dynamo'})\n"
                "from torch import nn"
            ),
            "TORCH_LOGS",
        ),
        (
            ("os.environ.update(PYTORCH_JIT='0')\nfrom model import Net"),
            "PYTORCH_JIT",
        ),
        (
            ("os.environ |= {'ATEN_CPU_CAPABILITY': 'default'}\nimport torch.nn"),
            "ATEN_CPU_CAPABILITY",
        ),
        (
            ("os.putenv('KMP_AFFINITY', 'none')\nimport torch"),
            "KMP_AFFINITY",
        ),
        (
            ("del os.environ[b'TORCH_LOGS']\nimport torch"),
            "TORCH_LOGS",
        ),
        (
            ("for name in names:\n    os.environ[name] = '1'\nimport torch"),
            "the environment",
        ),
        (
            ("def main():\n    os.environ['PYTORCH_JIT'] = '0'\n    import torch\nmain()"),
            "PYTORCH_JIT",
        ),
        (
            ("import torch\nos.environ['OMP_NUM_THREADS'] = '2'"),
            "",
        ),
        (
            ("os.environ['MASTER_ADDR'] = 'here'\nimport torch"),
            "",
        ),
        (
            ("print(os.environ.get('OMP_NUM_THREADS'))\nimport torch"),
            "",
        ),
        (
            ("import torch"),
            "",
        ),
        (
            ("no Python"),
            "",
        ),
    ],
)
def test_a_variable_for_torch_set_before_its_import_is_found(
    tmp_path: Path, text: str, variable: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    assert variable_set_first(JobSpec(program=str(program))) == variable
