"""The package's own tensors are on the CPU, whatever device a program has made the default."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "dure"

OF_THE_PROGRAM = ("cli", "data/images.py", "nn/experts.py", "tensor/factories.py")
"""Programs, and what makes the caller's tensors."""

FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
    *("sparse_compressed_tensor", "sparse_coo_tensor"),
)
"""Functions that `torch.set_default_device` and `with torch.device(...)` give another device."""


def calls_without_device(source: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}
            and not {keyword.arg for keyword in node.keywords} & {"device", None}
        ):
            yield node.lineno


def test_every_tensor_that_the_package_makes_names_its_device() -> None:
    found = [
        f"{path.relative_to(SOURCES)}:{line}"
        for path in sorted(SOURCES.rglob("*.py"))
        if not str(path.relative_to(SOURCES)).startswith(OF_THE_PROGRAM)
        for line in calls_without_device(path.read_text())
    ]
    assert not found


NAMES_CUDA = {
    "cli/doctor/rank.py": "lists GPUs",
    "comm/gpus.py": "asks which GPUs there are: the choice of NCCL",
    "comm/queries.py": "asks whether NCCL can run",
    "comm/backends/torch_engine.py": "NCCL itself",
    "parallel/amp/scaler.py": "the default device, as torch's",
    "parallel/dp/devices.py": "the default devices, as torch's",
    "parallel/dp/splitting.py": "asks whether there are GPUs",
}
"""Files that name `torch.cuda`, none of them for its streams, and why."""

STREAMS = ("Stream", "Event", "stream", "current_stream", "default_stream", "synchronize")


def names_of_cuda(source: str) -> Iterator[str]:
    """Return the attributes of `torch.cuda` that a source names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda":
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            yield from (alias.name for alias in node.names)


def test_streams_are_those_of_the_tensors_device() -> None:
    found = {
        str(path.relative_to(SOURCES)): names
        for path in sorted(SOURCES.rglob("*.py"))
        if (names := {*names_of_cuda(path.read_text())})
    }
    assert {*found} == {*NAMES_CUDA}
    assert not {name for names in found.values() for name in names} & {*STREAMS}
