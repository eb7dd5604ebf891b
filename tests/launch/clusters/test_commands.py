"""What the ssh launcher says to each host."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess

import pytest

from dure.errors import UsageError
from dure.launch.clusters.commands import HostsJob, first_lines, host_command
from dure.launch.clusters.hosts import Slots

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
    say = "import os, sys; print(os.environ['A'], os.environ['v'], os.getcwd(), sys.stdin.read())"
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexec python3 -c {shlex.quote(say)}\n")
    program.chmod(0o755)
    exports = {"A": "1 2'$x\\n", "v": "3"}
    job = dataclasses.replace(JOB, directory=str(directory), python=str(program), exports=exports)
    key, command = bytes(range(32)), host_command(job, 0)
    assert key.hex() not in command
    assert "1 2'" not in command
    done = subprocess.run(
        [shell, "-c", command],
        input=first_lines(job, key),
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().split("\n")[0] == f"1 2'$x\\n 3 {directory} {key.hex()}"


def test_value_of_several_lines_is_refused():
    with pytest.raises(UsageError):
        first_lines(dataclasses.replace(JOB, exports={"A": "1\n2"}), bytes(32))


def test_agents_are_killed_only_after_the_documented_time_to_save():
    assert (JOB.end_s, JOB.follow_s) == (35, 10)
    patient = dataclasses.replace(JOB, grace_s=60.0)
    assert (patient.end_s, patient.follow_s) == (65, 65)
