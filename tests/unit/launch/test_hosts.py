"""Hosts, and what is said to them."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess

import pytest

from dure.errors import UsageError
from dure.launch.clusters import hosts as hosts_module
from dure.launch.clusters import meeting
from dure.launch.clusters.commands import (
    HostsJob,
    first_lines,
    host_command,
    shown_command,
)
from dure.launch.clusters.hosts import Slots, read_hostfile, read_hosts
from dure.launch.clusters.meeting import outward
from dure.store.address import Address, resolve

pytest.importorskip("ClusterShell", reason="ClusterShell is not installed (extra: cluster)")


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
    ["", ",", "a,a", "n[1-", "a:0", "-oProxyCommand=x", "a b", "n[1-99999999]", "n[1-999]m[1-999]"],
)
def test_hosts_that_mean_nothing_are_refused(text):
    with pytest.raises(UsageError):
        read_hosts(text)


def test_hostfile_of_any_mpi(tmp_path):
    path = tmp_path / "hosts"
    path.write_text(
        "# the cluster\na slots=2  # Open MPI\nb:3\n\nnode[1-2] slots=4 max_slots=8\nc\n"
    )
    found = [("a", 2), ("b", 3), ("node1", 4), ("node2", 4), ("c", None)]
    assert pairs(read_hostfile(path)) == found


@pytest.mark.parametrize("text", ["a slots=x", "a what", "# nothing", "a slots=0"])
def test_malformed_hostfile_is_refused(text, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_hostfile(path)
    with pytest.raises(UsageError):
        read_hostfile(tmp_path / "missing")


def test_missing_cluster_shell_names_the_extra(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(hosts_module.importlib, "import_module", missing)
    with pytest.raises(UsageError) as caught:
        read_hosts("a")
    assert "'.[cluster]'" in caught.value.fix


JOB = HostsJob(
    hosts=(Slots(host="n1", nproc=2), Slots(host="n2", nproc=2)),
    program=("train.py", "--lr", "0.1 x"),
    flags=("--max-restarts", "3"),
    run_id="job",
    endpoint="10.0.0.1:20000",
    directory="/home/me/my project",
    python="/opt/py thon",
    exports={"A": "1 2'"},
)


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_hosts_shell_reads_variables_and_leaves_the_key(shell, tmp_path):
    directory = tmp_path / "with a blank"
    directory.mkdir()
    say = "import os, sys; print(os.environ['A'], os.getcwd(), sys.stdin.read())"
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexec python3 -c {shlex.quote(say)}\n")
    program.chmod(0o755)
    job = dataclasses.replace(
        JOB, directory=str(directory), python=str(program), exports={"A": "1 2'$x\\n"}
    )
    key, command = bytes(range(32)), host_command(job, 0)
    assert key.hex() not in command
    assert "1 2'" not in command
    done = subprocess.run(
        [shell, "-c", command],
        input=first_lines(job, key),
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().split("\n")[0] == f"1 2'$x\\n {directory} {key.hex()}"


def test_value_of_several_lines_is_refused():
    with pytest.raises(UsageError):
        first_lines(dataclasses.replace(JOB, exports={"A": "1\n2"}), bytes(32))


def test_shown_commands_are_words_of_a_shell():
    for number in range(2):
        head, *_, host, command = shlex.split(shown_command(JOB, number))
        assert (head, host) == ("ssh", f"n{number + 1}")
        words = shlex.split(command)
        assert words[:2] == ["cd", JOB.directory]
        assert "--leash" not in words and "--key-stdin" not in words
        assert words[words.index("--node-rank") + 1] == str(number)


@pytest.fixture
def names(monkeypatch):
    """Know node1 as Debian's /etc/hosts does, and the way to node2."""
    known = {"node1": "127.0.1.1"}

    def look_up(host: str, port: int, purpose: str = "") -> Address:
        return resolve(known.get(host, host), port)

    ways = {"node2": "10.0.0.1", "six": "fd00::1"}
    monkeypatch.setattr(meeting, "resolve", look_up)
    monkeypatch.setattr(meeting, "interface_to", ways.get)


@pytest.mark.parametrize(
    ("endpoint", "hosts", "found"),
    [
        ("node1:20000", ["node1", "node2"], "10.0.0.1:20000"),
        ("node1:20000", ["node1", "six"], "[fd00::1]:20000"),
        ("node1:20000", ["node1"], "node1:20000"),
        ("node1:20000", ["node1", "unknown"], "node1:20000"),
        ("192.0.2.1:20000", ["192.0.2.1", "node2"], "192.0.2.1:20000"),
    ],
)
def test_endpoint_on_loopback_is_moved_to_where_others_see_it(names, endpoint, hosts, found):
    assert outward(endpoint, hosts) == found
