"""Jobs in pods: hosts that start seconds apart, whose names come with them and may move.

A pod is a network namespace with a host name of its own; all share one file as their /etc/hosts,
which is written while they run, as a cluster's name server learns of pods.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.comm.namespace_hosts import Host, hosts
from tests.waiting import PATIENCE_S, key_file

pytestmark = pytest.mark.needs("network namespaces")

CLUSTERS = Path(__file__).parents[3] / "docs" / "clusters.md"
TELL = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'GROUP_RANK')))\n"


class Pods:
    """The pods of one indexed job of two, called train-0 and train-1; `spare` has an address."""

    def __init__(self, made: list[Host], folder: Path) -> None:
        self.nodes, self.spare = made[:2], made[2:]
        self.folder, self._names = folder, folder / "hosts"
        self._names.write_text("127.0.0.1 localhost\n")
        key_file(folder / "key")
        for host in made:
            mount = host.start_any(["mount", "--bind", self._names, "/etc/hosts"], {})
            assert mount.wait(PATIENCE_S) == 0, mount.communicate()

    def know(self, index: int, address: str) -> None:
        """Let the name server know where a pod is, and forget where it was."""
        name = f"train-{index}.train"
        lines = [x for x in self._names.read_text().splitlines() if name not in x]
        self._names.write_text("\n".join([*lines, f"{address} {name} train-{index}"]) + "\n")

    def start(
        self, host: Host, words: Sequence[str | Path], **variables: str
    ) -> subprocess.Popen[str]:
        """Start a Python program on a host."""
        return host.start(words, self._shared | variables)

    def start_any(
        self, host: Host, words: Sequence[str | Path], **variables: str
    ) -> subprocess.Popen[str]:
        """Start any program on a host."""
        return host.start_any(words, self._shared | variables)

    @property
    def _shared(self) -> dict[str, str]:
        return {"DURE_JOB_KEY_FILE": str(self.folder / "key"), "OMP_NUM_THREADS": "1"}

    def start_pod(self, host: Host, index: int, *words: str | Path) -> subprocess.Popen[str]:
        """Start a pod's program, with the variables of docs/clusters.md."""
        variables = {
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "HOSTNAME": f"train-{index}",
            "JOB_COMPLETION_INDEX": str(index),
            "NNODES": "2",
            "MASTER_ADDR": "train-0.train",
        }
        return self.start(host, words, **variables)

    def write(self, text: str) -> Path:
        """Write the program."""
        path = self.folder / "program.py"
        path.write_text(text)
        return path


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with hosts(3) as made:
        yield Pods(made, tmp_path)


def awaited(process: subprocess.Popen[str], text: str) -> None:
    """Read a launcher's lines up to one with `text`."""
    assert process.stderr is not None
    while text not in (line := process.stderr.readline()):
        assert line, "the launcher has ended"


def ended(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return sorted(out.splitlines())


def test_the_first_pod_may_come_last_and_so_may_its_name(pods: Pods) -> None:
    run = ("-m", "dure.cli", "run", "--nproc", "1", "--prefix", "none", pods.write(TELL))
    second = pods.start_pod(pods.nodes[1], 1, *run)
    awaited(second, "'train-0.train' is not known here yet")
    pods.know(0, pods.spare[0].address)  # a pod that is replaced before anybody has met it
    awaited(second, "no answer from")
    pods.know(0, pods.nodes[0].address)
    first = pods.start_pod(pods.nodes[0], 0, *run)
    assert ended(first) == ["0 2 0"]
    assert ended(second) == ["1 2 1"]


RESTARTED = """
import os, pathlib, sys, time
folder, count = pathlib.Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(os.environ["RANK"], os.environ["WORLD_SIZE"], count, flush=True)
while count == 0 or not (folder / "end").exists():
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_pod_that_comes_back_with_another_address_finds_the_job(pods: Pods) -> None:
    program = pods.write(RESTARTED)
    run = ("-m", "dure.cli", "run", "--nproc", "1", "--max-restarts", "2", "--prefix", "none")
    pods.know(0, pods.nodes[0].address)
    first = pods.start_pod(pods.nodes[0], 0, *run, program, pods.folder)
    second = pods.start_pod(pods.nodes[1], 1, *run, program, pods.folder)
    assert first.stdout is not None
    assert second.stdout is not None
    assert first.stdout.readline() == "0 2 0\n"
    assert second.stdout.readline() == "1 2 0\n"
    pods.nodes[0].kill()
    pods.know(0, pods.spare[0].address)
    again = pods.start_pod(pods.spare[0], 0, *run, program, pods.folder)
    assert again.stdout is not None
    assert again.stdout.readline() == "0 2 1\n"
    assert second.stdout.readline() == "1 2 1\n"
    (pods.folder / "end").touch()
    assert ended(again) == ended(second) == []


JOIN = """
import dure
dure.init_process_group("gloo")
print(dure.get_rank(), dure.get_world_size())
dure.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_without_a_launcher_waits_for_the_first_pods_name(pods: Pods) -> None:
    program = pods.write(JOIN)
    second = pods.start_pod(pods.nodes[1], 1, program)
    awaited(second, "'train-0.train' is not known here yet")
    pods.know(0, pods.nodes[0].address)
    first = pods.start_pod(pods.nodes[0], 0, program)
    assert ended(first) == ["0 2"]
    assert ended(second) == ["1 2"]


def test_the_line_for_skypilot_in_the_docs_runs(pods: Pods) -> None:
    """The line of docs/clusters.md, with the variables as SkyPilot 0.14 sets them."""
    row = next(x for x in CLUSTERS.read_text().splitlines() if x.startswith("| SkyPilot |"))
    line = row.split("`")[1].replace("\\|", "|")
    command = line.replace("dure run", f"{sys.executable} -m dure.cli run --prefix none")
    command = command.replace("train.py", str(pods.write(TELL)))
    shared = {
        "SKYPILOT_NODE_IPS": "\n".join(node.address for node in pods.nodes),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
    }
    nodes = [
        pods.start_any(host, ["sh", "-c", command], SKYPILOT_NODE_RANK=str(rank), **shared)
        for rank, host in enumerate(pods.nodes)
    ]
    assert ended(nodes[0]) == ["0 4 0", "1 4 0"]
    assert ended(nodes[1]) == ["2 4 1", "3 4 1"]
