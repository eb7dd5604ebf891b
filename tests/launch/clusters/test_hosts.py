"""`--hosts` and `--hostfile`."""

import subprocess
from pathlib import Path

import pytest

from dure.errors import UsageError
from dure.launch.clusters import hosts as hosts_module
from dure.launch.clusters.hosts import read_hostfile, read_hosts

pytestmark = pytest.mark.needs("ClusterShell")


def pairs(slots):
    return [(s.host, s.nproc) for s in slots]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", [("a", None)]),
        ("b,a", [("b", None), ("a", None)]),
        ("node[1-2,7]", [("node1", None), ("node2", None), ("node7", None)]),
        ("node[1-4]!node[2-3]", [("node1", None), ("node4", None)]),
        ("a:2,b[1-2]:4", [("a", 2), ("b1", 4), ("b2", 4)]),
        ("a:2,b:1,a:1", [("a", 3), ("b", 1)]),
        ("10.0.0.[1-2]", [("10.0.0.1", None), ("10.0.0.2", None)]),
    ],
)
def test_hosts_mean(text, found):
    assert pairs(read_hosts(text)) == found


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,a", "n[1-"],
)
def test_hosts_that_mean_nothing_are_refused(text):
    with pytest.raises(UsageError):
        read_hosts(text)


def test_hosts_of_the_slurm_job_around_the_shell(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST is not set"):
        read_hosts("slurm")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "cn[08-09],login")
    assert pairs(read_hosts("slurm")) == [("cn08", None), ("cn09", None), ("login", None)]


def test_hostfile_has_hosts_and_slots(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# the cluster\na slots=2  # fast\nb:3\n\nnode[1-2] slots=4\nc\n")
    found = [("a", 2), ("b", 3), ("node1", 4), ("node2", 4), ("c", None)]
    assert pairs(read_hostfile(path)) == found


def test_hostfile_may_be_a_pipe_of_a_command():
    command = ["bash", "-c", "sleep 0.2; printf 'a\\nb slots=2\\n'"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as listing:
        path = Path(f"/dev/fd/{listing.stdout.fileno()}")
        assert pairs(read_hostfile(path)) == [("a", None), ("b", 2)]


@pytest.mark.parametrize("text", ["a slots=x", "a what", "# nothing"])
def test_malformed_hostfile_is_refused(text, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_hostfile(path)
    with pytest.raises(UsageError, match="missing"):
        read_hostfile(tmp_path / "missing")


def test_missing_cluster_shell_names_the_extra(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(hosts_module.importlib, "import_module", missing)
    with pytest.raises(UsageError) as caught:
        read_hosts("a")
    assert "'.[cluster]'" in caught.value.fix
