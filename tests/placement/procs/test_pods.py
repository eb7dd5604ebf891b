"""Jobs in pods: hosts that start seconds apart, whose names come with them and may move.

A pod is a network namespace with a host name of its own; all share one file as their /etc/hosts,
which is written while they run, as a cluster's name server learns of pods.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comm.namespace_hosts import Host, hosts
from tests.waiting import PATIENCE_S, key_file

pytestmark = pytest.mark.needs("network namespaces")

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

    def start_pod(self, host: Host, index: int, *words: str | Path) -> subprocess.Popen[str]:
        """Start a pod's program, with the variables of docs/clusters.md."""
        variables = {
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "HOSTNAME": f"train-{index}",
            "JOB_COMPLETION_INDEX": str(index),
            "NNODES": "2",
            "MASTER_ADDR": "train-0.train",
        }
        variables |= {"DURE_JOB_KEY_FILE": str(self.folder / "key"), "OMP_NUM_THREADS": "1"}
        return host.start(words, variables)

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
folder, count = pathlib.Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
print(os.environ["RANK"], os.environ["WORLD_SIZE"], count, flush=True)
while not (folder / "end").exists():
    time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("replaced", "number"), [(0, 0), (1, 1)])
def test_a_pod_that_comes_back_with_another_address_finds_the_job(
    pods: Pods, replaced: int, number: int
) -> None:
    """The first pod coordinates, so its replacement begins the job anew, with round 0."""
    program = pods.write(RESTARTED)
    run = ("-m", "dure.cli", "run", "--nproc", "1", "--max-restarts", "2", "--prefix", "none")
    run = (*run, program, pods.folder)
    pods.know(0, pods.nodes[0].address)
    started = [pods.start_pod(node, index, *run) for index, node in enumerate(pods.nodes)]
    assert lines(started) == ["0 2 0\n", "1 2 0\n"]
    pods.nodes[replaced].kill()
    pods.know(replaced, pods.spare[0].address)
    started[replaced] = pods.start_pod(pods.spare[0], replaced, *run)
    assert lines(started) == [f"0 2 {number}\n", f"1 2 {number}\n"]
    (pods.folder / "end").touch()
    assert [ended(pod) for pod in started] == [[], []]


def lines(pods: list[subprocess.Popen[str]]) -> list[str]:
    """Read the next line of each pod's program."""
    return [pod.stdout.readline() for pod in pods if pod.stdout is not None]
