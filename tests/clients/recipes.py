"""The programs of examples/clients: how each is started, and what its output is compared with.

Each runs with torch's Gloo first. Then it runs with Dure in every way that its user may choose: in
the place of Gloo, by the name "dure", or with Dure's own names. The lines that rank 0 prints, with
all digits, must be the same.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dure.launch.ranks.ports import reserve_port
from tests.waiting import PATIENCE_S

FOLDER = Path(__file__).parents[2] / "examples/clients"
NAMED, SWAPPED = "dure", "--dure"
"""The last argument of a program that is to use the name "dure", or `import dure`."""
TORCHRUN = "torch.distributed.run"
_IN_PLACE, _BY_CHOICE = "in Gloo's place", {NAMED: "by name", SWAPPED: "`import dure`"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One program of a client.

    Args:
        client: The package whose program it is, "" for torch's alone.
        what: What the program does, for the table.
        program: A file of examples/clients without its ending, or the module of a test of the
            client's own.
        arguments: The program's arguments.
        choices: Arguments that choose Dure, besides its place as Gloo.
        nproc: How many ranks.
        torchrun: Whether it runs under torchrun as well.
        starts_ranks: Whether the program starts its ranks itself, so that no launcher does.
        checks_itself: Whether it is a program of Dure's names that compares its results itself, so
            that it runs once, and not with Gloo.
        repeats: How often it runs in each way, in a row.
        needs: Further packages.
    """

    client: str
    what: str
    program: str
    arguments: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    nproc: int = 2
    torchrun: bool = False
    starts_ranks: bool = False
    checks_itself: bool = False
    repeats: int = 1
    needs: tuple[str, ...] = ()

    @property
    def is_module(self) -> bool:
        return "." in self.program

    @property
    def name(self) -> str:
        return self.program.rpartition(".")[2]

    def missing(self) -> list[str]:
        """Return the packages that it needs and that are not installed."""
        installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
        return [name for name in (self.client, *self.needs) if name and name not in installed]

    def version(self) -> str:
        name = self.client or "torch"
        return f"{name} {importlib.metadata.version(name)}"


ACCELERATE = "accelerate.test_utils.scripts"
RECIPES = (
    Recipe(
        client="transformers", what="Trainer: DDP, validation", program="hf_trainer",
        needs=("accelerate",),
    ),
    Recipe(
        client="transformers", what='`tp_plan="auto"`: forward, backward, generate',
        program="tp_plan", choices=(NAMED,), needs=("accelerate",),
    ),
    Recipe(
        client="accelerate", what="DDP, gradient accumulation, uneven last batch",
        program="accelerate_ddp",
    ),
    Recipe(
        client="accelerate", what="FSDP2, `save_state`, `load_state`", program="accelerate_fsdp2"
    ),
    Recipe(client="accelerate", what="its own test", program=f"{ACCELERATE}.test_ops"),
    Recipe(client="accelerate", what="its own test", program=f"{ACCELERATE}.test_sync"),
    Recipe(client="accelerate", what="its own test", program=f"{ACCELERATE}.test_script"),
    Recipe(client="pytorch-ignite", what="DDP, metrics of all ranks", program="ignite_ddp"),
    Recipe(client="lightning", what="Fabric: DDP, FSDP2", program="fabric", choices=(NAMED,)),
    Recipe(
        client="lightning", what="Trainer: DDP, FSDP2, validation, `log(sync_dist=True)`",
        program="lightning_trainer", choices=(NAMED,),
    ),
    Recipe(
        client="torchmetrics", what="metrics of all ranks, at `compute` and at each step",
        program="torchmetrics_sync", choices=(NAMED,),
    ),
    Recipe(
        client="peft", what="LoRA by DDP and by fully_shard, adapters saved", program="peft_lora",
        choices=(NAMED,),
    ),
    Recipe(
        client="tqdm", what="tqdm, rich, TensorBoard under `dure run`", program="progress",
        choices=(NAMED,), needs=("rich", "tensorboard"),
    ),
    Recipe(
        client="ray", what="Ray Train: `TorchTrainer` with two workers", program="ray_train",
        choices=(NAMED,), starts_ranks=True,
    ),
    Recipe(
        client="transformers", what="8 files into a 2 x 2 mesh, backward, generate",
        program="hf_eight_shards", nproc=4, checks_itself=True,
    ),
    Recipe(
        client="torchdata", what="`StatefulDataLoader`: killed, resumed by 3 ranks, then by 2",
        program="data_stateful_loader", starts_ranks=True, checks_itself=True,
    ),
    Recipe(
        client="datasets", what="map-style and streamed: killed twice, resumed",
        program="data_datasets", starts_ranks=True, checks_itself=True,
    ),
    Recipe(
        client="webdataset", what="tar files: killed, resumed by 3 ranks, then by 2",
        program="data_webdataset", starts_ranks=True, checks_itself=True,
    ),
    Recipe(
        client="", what="a loop as in nanoGPT, 20 times in each way", program="ddp_loop",
        choices=(NAMED,), torchrun=True, repeats=20,
    ),
    Recipe(
        client="", what="tensor, pipeline and data parallel at once, as in picotron",
        program="three_dimensions", arguments=("2", "2", "2"), choices=(SWAPPED,), nproc=8,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """A way to start a recipe: its name, and the words that follow the interpreter."""

    name: str
    words: tuple[str, ...]
    stands_in: bool = False


def ways_of(recipe: Recipe) -> list[Way]:
    """Return how a recipe is started; first with torch's Gloo, which the others must equal.

    A recipe that checks itself is started in one way.
    """
    target = ("-m", recipe.program) if recipe.is_module else (str(FOLDER / f"{recipe.program}.py"),)
    target = (*target, *recipe.arguments)
    run = ("-m", "dure.run", f"--nproc={recipe.nproc}", "--prefix=none", "--no-fold")
    if recipe.checks_itself:
        words = target if recipe.starts_ranks else (*run, *target)
        return [Way(_BY_CHOICE[SWAPPED], words)]
    if recipe.starts_ranks:
        return [Way("gloo", target), *(Way(_BY_CHOICE[c], (*target, c)) for c in recipe.choices)]
    launchers: dict[str, tuple[str, ...]] = {"": run}
    if recipe.torchrun:
        torchrun = ("-m", TORCHRUN, f"--nproc-per-node={recipe.nproc}")
        launchers[" under torchrun"] = torchrun
    return [
        Way("gloo", (*run, *target)),
        *(Way(f"{_IN_PLACE}{under}", (*words, *target), True)
          for under, words in launchers.items()),
        *(Way(f"{_BY_CHOICE[choice]}{under}", (*words, *target, choice))
          for under, words in launchers.items() for choice in recipe.choices),
    ]  # fmt: skip


def run(recipe: Recipe, way: Way) -> list[str]:
    """Run a recipe once, and return the lines of its results.

    Raises:
        AssertionError: It failed; the text has the end of its output.
    """
    variables = {
        **{"DURE_STAND_IN": "gloo" if way.stands_in else "", "TOKENIZERS_PARALLELISM": "false"},
        **{"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    }
    # `dure run` keeps a port for its ranks; torchrun takes 29500, which another process may have.
    keeper, port = reserve_port()
    with keeper:
        if TORCHRUN in way.words:
            variables["PET_MASTER_PORT"] = str(port)
        done = subprocess.run(
            [sys.executable, *way.words],
            env={**os.environ, **variables},
            capture_output=True, text=True, check=False, timeout=4 * PATIENCE_S,
        )  # fmt: skip
    assert done.returncode == 0, (
        f"{way.name}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    replaced = "Dure replaces gloo" in done.stderr
    assert replaced == way.stands_in, f"{way.name}: {done.stderr[-2000:]}"
    return [] if recipe.is_module else done.stdout.splitlines()


def check(recipe: Recipe, repeats: int) -> None:
    """Run a recipe in all its ways, and compare what it prints.

    Raises:
        AssertionError: A run failed, or printed other lines than with torch's Gloo.
    """
    first, *others = ways_of(recipe)
    expected = run(recipe, first)
    assert expected or recipe.is_module, "nothing was printed"
    for way in others:
        for _ in range(min(repeats, recipe.repeats)):
            lines = run(recipe, way)
            assert lines == expected, f"{way.name} printed\n{lines}\nand gloo\n{expected}"
