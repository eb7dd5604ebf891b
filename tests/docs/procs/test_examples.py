"""Every example runs to its end with more ranks and under torchrun; each checks its own results.

`.ci/run` runs each as its text says, with two ranks or more. Here, in the drill (`make drill`),
also with three and four, where rings and grids look different, and under torchrun.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

EXAMPLES = Path(__file__).parents[3] / "examples"
ALL = sorted([*EXAMPLES.glob("[0-9]*.py"), *EXAMPLES.glob("recipes/*.py")])
STARTS: dict[str, tuple[str, ...]] = {
    f"{n} ranks": ("dure.cli", "run", "--nproc", f"{n}", "--keep-going") for n in (2, 3, 4)
}
STARTS["torchrun"] = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("example", ALL, ids=lambda path: path.name)
def test_example_runs_to_its_end(example: Path, start: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *STARTS[start], str(example)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
