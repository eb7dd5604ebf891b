"""The check of each recipe fails if the recipe is wrong: one line of each is broken here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

RECIPES = Path(__file__).parents[3] / "examples/recipes"
BROKEN = {  # a line of each recipe, and a mistake that users make there
    "ema": ("get_ema_multi_avg_fn(DECAY)", "get_ema_multi_avg_fn(DECAY / 2)"),
    "evaluate": ("batch_size=BATCH, pad=False", "batch_size=BATCH"),
    "export": ("    model.load_state_dict(weights)\n", ""),
    "load_hugging_face": ('"gate": "mlp.gate_proj", "up": "mlp.up_proj"',
                          '"gate": "mlp.up_proj", "up": "mlp.gate_proj"'),
    "lora_quantized": ("packed // 16, packed % 16", "packed % 16, packed // 16"),
    "muon": ("dist.all_to_all(sent, returned)", "dist.all_to_all(returned, sent)"),
    "optimizer_in_backward": ("        parameter.grad = None\n", ""),
    "uneven_microbatches": ("scale if has_one else 0.0", "scale"),
}  # fmt: skip


def run(program: Path, ranks: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dure.run", f"--nproc={ranks}", str(program)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=PATIENCE_S,
    )  # fmt: skip


def test_every_recipe_is_broken_here() -> None:
    assert {path.stem for path in RECIPES.glob("*.py")} == BROKEN.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_recipe_with_a_mistake_fails(name: str, tmp_path: Path) -> None:
    right = (RECIPES / f"{name}.py").read_text()
    before, after = BROKEN[name]
    assert right.count(before) == 1
    (tmp_path / "broken.py").write_text(right.replace(before, after))
    (ranks,) = re.findall(r"dure run --nproc (\d)", right)
    done = run(tmp_path / "broken.py", ranks)
    assert done.returncode != 0, done.stdout
    assert "AssertionError" in done.stdout, done.stdout
