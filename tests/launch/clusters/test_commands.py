"""What the ssh launcher says to each host."""

import dataclasses
import json
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


SAY = """
import json, os, sys
program = sys.argv[sys.argv.index("--") + 1:]
shown = {name: value for name, value in os.environ.items() if name.startswith("X_")}
print(json.dumps([program, shown, os.getcwd(), sys.stdin.read()]))
"""
WORDS = ("a b", "it's", '"q"', "$HOME", "", "ünï→", "*", "back\\slash", "two\nlines", "`x`")
WORDS += ("$(id)", "!h", "--nproc", "-x", "~", "#", "a;b", "%s", "--")


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_hosts_shell_reads_words_and_variables_as_they_are_and_leaves_the_key(shell, tmp_path):
    directory = tmp_path / "with a blank"
    directory.mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec python3 -c {shlex.quote(SAY)} "$@"\n')
    python.chmod(0o755)
    exports = {"X_A": "1 2'$x\\n\"`x`", "X_EMPTY": "", "X_U": " ünï→ "}
    place = {"directory": str(directory), "python": str(python)}
    job = dataclasses.replace(JOB, **place, program=WORDS, exports=exports)
    key, command = bytes(range(32)), host_command(job, 0)
    assert key.hex() not in command
    assert "1 2'" not in command
    done = subprocess.run(
        [shell, "-c", command],
        input=first_lines(job, key),
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout) == [[*WORDS], exports, str(directory), f"{key.hex()}\n"]


def test_value_of_several_lines_is_refused():
    with pytest.raises(UsageError):
        first_lines(dataclasses.replace(JOB, exports={"A": "1\n2"}), bytes(32))


def test_agents_are_killed_only_after_the_documented_time_to_save():
    assert (JOB.end_s, JOB.follow_s) == (35, 10)
    patient = dataclasses.replace(JOB, grace_s=60.0)
    assert (patient.end_s, patient.follow_s) == (65, 65)
