"""`dure run --hosts` over real ssh: hosts that cannot take part, and deaths of its processes.

Hosts that end in order, and the key's secrecy, are in `launch.procs.test_ssh_launcher`, cut cables
in `launch.faults.test_ssh_launcher_network_cuts`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.comm.namespace_hosts import Host
from tests.hosts.ways import HostJobs
from tests.launch.procs.ssh_hosts import front, ssh_hosts
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.needs("sshd", "ClusterShell")

WAIT = "import signal; signal.pause()"
SHOW = """
import json, os, sys
shown = {name: value for name, value in os.environ.items() if name.startswith("X_")}
print(json.dumps([sys.argv[1:], shown]), flush=True)
"""
BUILD = "import dure.version; dure.version.VERSION = '9.8.7'"
SILENT = "import socket, time; s = socket.create_server(('', 2223)); time.sleep(1000)"
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Host], Path]]:
    with ssh_hosts(2, tmp_path_factory.mktemp("ssh"), name="ssh") as made:
        made[0][1].start([f"-c{SILENT}"], {})
        yield made


@pytest.fixture
def run(two_hosts: tuple[list[Host], Path], tmp_path: Path) -> Callable:
    """Return what runs a program on hosts, and returns exit code, output and errors."""

    def run(nodes: str, program: str, *flags: str, words: tuple[str, ...] = (), **variables: Any):
        path = tmp_path / "program.py"
        path.write_text(program)
        flags = ("--nproc", "1", "--no-zygote", *flags)
        job = front(two_hosts[0][0], two_hosts[1], nodes, [*flags, path, *words], **variables)
        out, err = job.communicate(timeout=PATIENCE_S)
        assert left_on(two_hosts[0]) == []
        return job.returncode, out, err

    return run


def left_on(made: list[Host]) -> list[str]:
    """Return the processes on hosts but those that this test has started there."""
    lines = [line for host in made for line in host.inside()]
    return [line for line in lines if "sshd" not in line and "2223" not in line]


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("-oHostName=10.1.1.1", "Network is unreachable"),
        ("-oPort=2222", "Connection refused"),
        ("-oUser=nobody", "Permission denied"),
        ("-oUserKnownHostsFile=/dev/null", "Host key verification failed"),
        pytest.param("-oHostName=10.213.7.77", "No route to host", marks=SLOW),
        pytest.param("-oPort=2223", "Connection timed out during banner exchange", marks=SLOW),
    ],
)
def test_a_host_that_cannot_be_reached_is_named_with_the_reason(
    option: str, why: str, run: Callable
) -> None:
    code, _, err = run("a,b", WAIT, f"--ssh-option={option}")
    lines = [line for line in err.splitlines() if "host b cannot be reached, or was lost: " in line]
    assert (code, len(lines)) == (255, 1), err
    assert why in lines[0]


def test_words_and_variables_reach_the_program_as_they_are(run: Callable) -> None:
    words = ("a b", "it's", '"q"', "$HOME", "", "ünï→", "*", "back\\slash", "two\nlines", "`x`")
    words += ("$(id)", "!h", "--nproc", "-x", "~", "#", "a;b", "%s")
    variables = {"X_A": "a b'\"$HOME`x`", "X_EMPTY": "", "X_U": "ünï→ \\n"}
    exports = [f"-x{name}={value}" for name, value in variables.items()]
    code, out, err = run(
        "b,a", SHOW, "--no-fold", "-xX_HERE", *exports, words=words, X_HERE=" a  b "
    )
    assert code == 0, err
    shown = [json.loads(line.partition("] ")[2]) for line in out.splitlines()]
    assert shown == 2 * [[list(words), variables | {"X_HERE": " a  b "}]]


def test_a_host_with_another_version_of_dure_says_so(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BUILD)
    python = tmp_path / "python"
    there = f'[ "$(hostname)" != b ] || export PYTHONPATH={tmp_path}'
    python.write_text(f'#!/bin/sh\n{there}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    code, _, err = run("a,b", WAIT, "--remote-python", str(python), "--timeout-term", "0")
    assert code == 2, err
    assert "the job at this endpoint runs with another build of Dure" in err
    assert "on a" in err
    assert "9.8.7" in err
    assert "ending the hosts that still run: a" in err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_with_sshs_own_code_is_no_lost_host(rank: int, run: Callable) -> None:
    program = f"import os, sys; sys.exit(-1 if os.environ['RANK'] == '{rank}' else 0)"
    code, _, err = run("a,b", program)
    assert code == 255, err
    assert f"rank {rank} on {'ab'[rank]}" in err
    assert "cannot be reached" not in err


LOST = "host b cannot be reached, or was lost: "
DEATHS = {
    "dure run on b": (1, ("--node-rank 1",), 255, LOST + "ssh ended without a word, as when"),
    "sshd on b": (1, ("sshd: root@notty",), 255, LOST + "Connection to 10.213.7.2 closed"),
    "ssh": (0, ("ssh -F", "-- b "), 137, "ssh to host b was killed by SIGKILL"),
    "dure run on a": (0, ("--node-rank 0", "--leash"), 137, "`dure run` on host a was killed by"),
    "dure run --hosts": (0, ("--hosts",), -9, ""),
}


@pytest.mark.needs("engine")
@pytest.mark.parametrize(
    "who",
    [
        "dure run on b",
        "ssh",
        pytest.param("sshd on b", marks=SLOW),
        pytest.param("dure run on a", marks=SLOW),
        pytest.param("dure run --hosts", marks=SLOW),
    ],
)
def test_a_killed_process_is_named_and_nothing_of_the_job_remains(
    who: str, jobs: HostJobs, tmp_path: Path
) -> None:
    host, words, code, named = DEATHS[who]
    shared = set(os.listdir("/dev/shm"))
    job = jobs.start_reducing("ssh", lease_s=4)
    job.kill(host, *words)
    assert job.codes() == [code], job.printed()
    assert named in job.printed()
    jobs.check_nothing_left()
    until(lambda: not left_on(job.hosts), lambda: f"the end of {left_on(job.hosts)}")
    assert list(tmp_path.glob("**/dure_*")) == []
    assert {name for name in set(os.listdir("/dev/shm")) - shared if "dure" in name} == set()
