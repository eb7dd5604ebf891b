"""Every example runs to its end; each of them checks its own results.

`.ci/run` runs each with two ranks, as their texts say. Here, in the drill (`make drill`), also with
three and four, where rings and grids look different, and under torchrun.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ALL = sorted(path.name for path in EXAMPLES.glob("[0-9]*.py"))
LIMIT_S = 150


def run(*command: str) -> str:
    """Run a command; return what it printed after a check that it ended well."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    return output


def test_program_in_the_readme_runs_2_ranks(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    program = tmp_path / "train.py"
    program.write_text(blocks[0])
    output = run("dure.cli", "run", "--nproc", "2", str(program))
    for rank in range(2):
        assert f"rank {rank} of 2: [1.0, 1.0, 1.0, 1.0]" in output


PRELUDE = """
import torch
import dure as dist

dist.init_process_group()
torch.manual_seed(0)
x = torch.randn(100, 4)
dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(4, 1)
"""


def test_training_in_the_readme_runs_and_then_goes_on_2_ranks(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    training = next(block for block in blocks if "Checkpointer" in block)
    program = tmp_path / "train.py"
    program.write_text(PRELUDE + training.replace("runs/mine", str(tmp_path / "saved")))
    assert "median of 6 steps" in run("dure.cli", "run", "--nproc", "2", str(program))
    assert "median of 0 steps" in run("dure.cli", "run", "--nproc", "2", str(program))


@pytest.mark.slow
@pytest.mark.parametrize("n", ["2", "3", "4"])
@pytest.mark.parametrize("name", ALL)
def test_example_runs_to_its_end_with_more_ranks(name: str, n: str) -> None:
    assert run("dure.cli", "run", "--nproc", n, "--keep-going", str(EXAMPLES / name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_example_runs_under_torchrun_2_ranks(name: str) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert run(*torchrun, str(EXAMPLES / name))


@pytest.mark.parametrize("name", ALL)
def test_example_is_short_and_explains_itself(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    assert len(lines) < 150
    assert lines[0].startswith('"""')
    assert any("dure run --nproc" in line and name in line for line in lines[:30])
