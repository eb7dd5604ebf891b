"""The same programs under torchrun and under `dure run`: what they find, and how they end.

torchrun needs seconds to start, so all its runs of this module go on at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from procs.launching import living

pytestmark = pytest.mark.timeout(180)  # seven imports of torch, all at once, on a busy machine

LAUNCHERS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
    "dure": (sys.executable, "-m", "dure.cli", "run"),
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

SIGNALLED = """
trap 'echo asked > "$OUT/$RANK.asked"; exit 0' TERM
echo "ready $RANK"
while :; do sleep 0.05; done
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


@dataclass
class Run:
    """One program under one launcher."""

    process: subprocess.Popen[str]
    out: Path
    tag: str
    finished: tuple[int, str] | None = None

    def wait(self) -> tuple[int, str]:
        """Return the exit code, and all that was printed."""
        if self.finished is None:
            text, _ = self.process.communicate(timeout=90)
            self.finished = self.process.returncode, text
        return self.finished

    def ranks(self) -> list[dict[str, Any]]:
        """Return what the ranks found."""
        code, text = self.wait()
        assert code == 0, text
        return [json.loads((self.out / f"{rank}.json").read_text()) for rank in (0, 1)]


def _start(launcher: str, directory: Path, *words: str, **variables: str) -> Run:
    out = Path(tempfile.mkdtemp(dir=directory))
    tag = f"{out}"
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {"OUT": str(out), "LAUNCH_TEST": tag, "TMPDIR": str(out), **variables}
    process = subprocess.Popen(
        [*LAUNCHERS[launcher], *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        env=environment,
    )
    return Run(process, out, tag)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Run]]]:
    directory = tmp_path_factory.mktemp("torchrun")
    (directory / "show.py").write_text(SHOW)
    (directory / "recorded.py").write_text(RECORDED)
    script = directory / "signalled.sh"
    script.write_text("#!/bin/sh\n" + SIGNALLED)
    script.chmod(0o755)
    flags = ("--standalone", "--nproc_per_node", "2", "--role=trainer")
    started: dict[str, dict[str, Run]] = {}
    for name in LAUNCHERS:
        started[name] = {
            "show": _start(
                name,
                directory,
                *flags,
                "--module",
                "show",
                "--epochs=3",
                "-m",
                "${local_rank}",
                PET_MAX_RESTARTS="2",
            ),
            "recorded": _start(name, directory, *flags, "recorded.py"),
            "signalled": _start(name, directory, *flags, "--no-python", str(script)),
        }
    yield started
    for of_one in started.values():
        for run in of_one.values():
            run.process.kill()
            run.wait()
            for pid in living(run.tag):
                os.kill(pid, signal.SIGKILL)


def test_ranks_find_the_same_variables(runs: dict[str, dict[str, Run]]) -> None:
    ours, theirs = (runs[name]["show"].ranks() for name in ("dure", "torchrun"))
    for mine, torchs in zip(ours, theirs, strict=True):
        names = (mine["env"].keys() | torchs["env"].keys()) - DIFFERENT.keys()
        differing = {
            name: (mine["env"].get(name), torchs["env"].get(name))
            for name in names
            if not name.startswith("DURE_") and mine["env"].get(name) != torchs["env"].get(name)
        }
        assert differing == {}
    # The comparison is not empty: torchrun's own are among them.
    assert theirs[1]["env"]["TORCHELASTIC_MAX_RESTARTS"] == "2"
    assert (ours[1]["env"]["ROLE_NAME"], ours[1]["env"]["RANK"]) == ("trainer", "1")


def test_every_variable_of_torchruns_is_set(runs: dict[str, dict[str, Run]]) -> None:
    ours, theirs = (runs[name]["show"].ranks()[0]["env"] for name in ("dure", "torchrun"))
    torchs_own = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
    missing = theirs.keys() - ours.keys() - torchs_own
    assert missing == set()


def test_ranks_find_the_same_arguments_and_each_other(runs: dict[str, dict[str, Run]]) -> None:
    ours, theirs = (runs[name]["show"].ranks() for name in ("dure", "torchrun"))
    for rank, (mine, torchs) in enumerate(zip(ours, theirs, strict=True)):
        for field in ("argv", "name", "sum"):
            assert mine[field] == torchs[field]
        assert mine["argv"][1:] == ["--epochs=3", "-m", str(rank)]
        assert mine["sum"] == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_recorded_error_is_told_once(runs: dict[str, dict[str, Run]], launcher: str) -> None:
    code, text = runs[launcher]["recorded"].wait()
    assert code == 1
    told = [line for line in text.splitlines() if "ValueError: the bug of rank 1" in line]
    assert len(told) == 2, text  # by the interpreter, and in the launcher's summary


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_program_is_asked_to_end(runs: dict[str, dict[str, Run]], launcher: str) -> None:
    run = runs[launcher]["signalled"]
    assert run.process.stdout is not None
    waiting = {"ready 0", "ready 1"}
    while waiting:
        line = run.process.stdout.readline()
        assert line, "it ended before it was ready"
        waiting = {text for text in waiting if text not in line}
    run.process.send_signal(signal.SIGTERM)
    code, text = run.wait()
    assert code != 0, text
    assert all((run.out / f"{rank}.asked").exists() for rank in (0, 1))
    assert living(run.tag) == []


def test_torchs_recorded_error_is_told_by_dure(tmp_path: Path) -> None:
    script = tmp_path / "recorded.py"
    module = "torch.distributed.elastic.multiprocessing.errors"
    script.write_text(
        RECORDED.replace("import dure", f"from {module} import record").replace("dure.", "")
    )
    # Behind a shell, so that the launcher knows nothing but the file.
    shell = tmp_path / "program.sh"
    shell.write_text(f'#!/bin/sh\n[ "$RANK" = 0 ] || {sys.executable} {script} 2>&- || exit 5\n')
    shell.chmod(0o755)
    run = _start("dure", tmp_path, "-n", "2", "--no-python", str(shell))
    code, text = run.wait()
    assert code == 5, text
    told = [line for line in text.splitlines() if "ValueError: the bug of rank 1" in line]
    assert len(told) == 1, text
    assert not list(run.out.glob("dure_*"))
