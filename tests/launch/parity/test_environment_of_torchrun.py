"""The same programs under torchrun and under `dure run`: what they find, and how they end.

torchrun needs seconds to start, so all its runs of this module go on at once.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.procs.launching import DURE, Finished, Launching

LAUNCHERS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
    "dure": (*DURE, "run"),
}

SHOW = """
import json, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(total)
found = {"env": dict(os.environ), "argv": sys.argv, "name": __name__, "sum": total.tolist()}
dist.destroy_process_group()
with open(os.path.join(os.environ["OUT"], f"{os.environ['RANK']}.json"), "w") as file:
    json.dump(found, file)
"""

RECORDED = """
import os
import dure
@dure.record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("the bug of rank 1")
main()
"""

DIFFERENT = {
    "MASTER_ADDR": "the host's name, or 127.0.0.1",
    "MASTER_PORT": "any free port",
    "TORCHELASTIC_RUN_ID": "random",
    "TORCHELASTIC_ERROR_FILE": "any path",
    "TORCHELASTIC_USE_AGENT_STORE": "torchrun's store is at MASTER_PORT; there Dure's is not",
    "OMP_NUM_THREADS": "1, or the host's cores divided",
    "MALLOC_TRIM_THRESHOLD_": "Dure's ranks keep the memory that they free",
    "MALLOC_MMAP_THRESHOLD_": "as the one before",
    "OUT": "of this test",
    "TMPDIR": "of this test",
    "LAUNCH_TEST": "of this test",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "torchrun's own note to itself",
    "PYTHONUNBUFFERED": "torchrun says -u instead",
}
"""Variables that may differ; all others that either launcher sets must be equal, but for DURE_*."""


class Run:
    """One program under one launcher, in a folder of its own."""

    def __init__(self, launcher: str, folder: Path, *words: str, **variables: str) -> None:
        self.out = Path(tempfile.mkdtemp(dir=folder))
        self.job = Launching(self.out)
        self.process = self.job.start_any(
            *LAUNCHERS[launcher],
            *words,
            env={"OUT": str(self.out), **variables},
            cwd=folder,
            stderr=subprocess.STDOUT,
        )
        self._finished: Finished | None = None

    def wait(self) -> Finished:
        """Return how it ended; nothing of it is left."""
        if self._finished is None:
            self._finished = self.job.finish(self.process)
        return self._finished

    def ranks(self) -> list[dict[str, Any]]:
        """Return what the ranks found."""
        done = self.wait()
        assert done.code == 0, done.out
        return [json.loads((self.out / f"{rank}.json").read_text()) for rank in (0, 1)]


Runs = dict[str, dict[str, Run]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "show.py").write_text(SHOW)
    (folder / "recorded.py").write_text(RECORDED)
    flags = ("--standalone", "--nproc_per_node", "2", "--role=trainer")
    program = ("--module", "show", "--epochs=3", "-m", "${local_rank}")
    started = {
        name: {
            "show": Run(name, folder, *flags, *program, PET_MAX_RESTARTS="2"),
            "recorded": Run(name, folder, *flags, "recorded.py"),
        }
        for name in LAUNCHERS
    }
    yield started
    for of_one in started.values():
        for run in of_one.values():
            run.job.kill()


def test_ranks_find_the_same_variables_arguments_and_each_other(runs: Runs) -> None:
    ours, theirs = (runs[name]["show"].ranks() for name in ("dure", "torchrun"))
    for rank, (mine, torchs) in enumerate(zip(ours, theirs, strict=True)):
        names = (mine["env"].keys() | torchs["env"].keys()) - DIFFERENT.keys()
        differing = {
            name: (mine["env"].get(name), torchs["env"].get(name))
            for name in names
            if not name.startswith("DURE_") and mine["env"].get(name) != torchs["env"].get(name)
        }
        assert differing == {}
        assert torchs["env"].keys() - mine["env"].keys() == {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
        for field in ("argv", "name", "sum"):
            assert mine[field] == torchs[field]
        assert mine["argv"][1:] == ["--epochs=3", "-m", str(rank)]
        assert mine["sum"] == [3.0, 3.0, 3.0]
    # The comparison is not empty: torchrun's own are among them.
    assert theirs[1]["env"]["TORCHELASTIC_MAX_RESTARTS"] == "2"
    assert (ours[1]["env"]["ROLE_NAME"], ours[1]["env"]["RANK"]) == ("trainer", "1")


def told(done: Finished) -> int:
    """Return how often the error was told."""
    return done.out.count("ValueError: the bug of rank 1\n")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_recorded_error_is_told_once(runs: Runs, launcher: str) -> None:
    done = runs[launcher]["recorded"].wait()
    assert (done.code, told(done)) == (1, 2), done.out  # by the interpreter, and in the summary


def test_torchs_recorded_error_is_told_by_dure(tmp_path: Path) -> None:
    module = "torch.distributed.elastic.multiprocessing.errors"
    (tmp_path / "recorded.py").write_text(
        RECORDED.replace("import dure", f"from {module} import record").replace("dure.", "")
    )
    # Behind a shell, so that the launcher knows nothing but the file.
    shell = f'[ "$RANK" = 0 ] || {sys.executable} recorded.py 2>&- || exit 5'
    run = Run("dure", tmp_path, "-n", "2", "--no-python", "sh", "-c", shell)
    done = run.wait()
    assert (done.code, told(done)) == (5, 1), done.out
    assert not list(run.out.glob("dure_*"))


FOR_TORCH = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.new_group(list(range(size)))
tensor = torch.ones(1)
dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
assert tensor.item() == size
model = nn.Linear(3, 2)
dist.broadcast(model.weight.data, 0)
model(torch.full((4, 3), float(rank))).sum().backward()
dist.all_reduce(model.weight.grad)
assert torch.equal(model.weight.grad, torch.full((2, 3), 4.0 * sum(range(size))))
dist.destroy_process_group()
print(f"rank {rank} of {size}: done", flush=True)
"""


def test_a_program_for_torch_runs_under_torchrun_with_its_import_changed(job: Launching) -> None:
    ours = FOR_TORCH.replace("import torch.distributed as dist", "import dure as dist")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = job.finish(job.start_any(sys.executable, *torchrun, job.write(ours)))
    assert done.code == 0, done.err
    said = sorted(re.findall(r"rank \d of \d: done", done.out))  # lines of two ranks may mix
    assert said == ["rank 0 of 2: done", "rank 1 of 2: done"]
