"""`dure doctor` on this machine, and as another host would be asked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dure.cli.doctor import hosts
from dure.cli.doctor.checks import Level
from tests.launch.procs.ssh_hosts import ssh_hosts
from tests.waiting import PATIENCE_S

DOCTOR = (sys.executable, "-m", "dure.cli", "doctor")


def test_doctor_tries_collectives_and_answers_in_json() -> None:
    words = [*DOCTOR, "--json", "--limit", str(PATIENCE_S)]
    done = subprocess.run(words, capture_output=True, check=False)
    told = json.loads(done.stdout)
    assert done.returncode == (1 if told["worst"] == "problem" else 0)
    levels = {finding["check"]: finding["level"] for finding in told["findings"]}
    for check in ("cores", "memory", "shared memory", "ports", "clock", "job key", "versions"):
        assert check in levels
    assert (levels["shm collective"], levels["gloo collective"]) == ("ok", "ok")
    if shutil.which("mpirun") and find_spec("mpi4py"):  # else there is no such finding
        assert levels["mpi collective"] == "ok"


def test_a_host_that_answers_has_the_same_versions_time_and_connections() -> None:
    told = hosts.ask("127.0.0.1", command=(*DOCTOR, "--answer", "127.0.0.1"))
    checks = ["ssh", "same versions", "clock difference", "connections", "connections"]
    assert [(f.check, f.level) for f in told] == [(check, Level.OK) for check in checks]


def test_host_that_does_not_answer_is_a_problem() -> None:
    (told,) = hosts.ask("127.0.0.1", command=(sys.executable, "-c", "raise SystemExit('no route')"))
    assert told.level is Level.PROBLEM and "no route" in told.seen


@pytest.mark.needs("sshd")
def test_doctor_asks_hosts_over_ssh(tmp_path: Path) -> None:
    with ssh_hosts(2, tmp_path) as (made, config):
        words = ["-m", "dure.cli", "doctor", "--json", "--no-collective"]
        asked = made[0].start([*words, "--hosts", "a,b,c", f"--ssh-option=-F{config}"], {})
        told = json.loads(asked.communicate(timeout=PATIENCE_S)[0])
    seen = {(f["host"], f["check"], f["level"]) for f in told["findings"] if f["host"]}
    for host in ("a", "b"):
        for check in ("ssh", "same versions", "clock difference", "connections"):
            assert (host, check, "ok") in seen
    assert ("c", "ssh", "problem") in seen
    assert asked.returncode == 1
