"""`dure doctor` on this machine, and over several hosts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.procs.ssh_hosts import ssh_hosts
from tests.waiting import PATIENCE_S

DOCTOR = (sys.executable, "-m", "dure.cli", "doctor")


def test_doctor_tries_collectives_and_answers_in_json() -> None:
    words = [*DOCTOR, "--json", "--limit", str(PATIENCE_S)]
    done = subprocess.run(words, capture_output=True, check=False)
    shown = json.loads(done.stdout)
    assert done.returncode == (1 if shown["worst"] == "problem" else 0)
    levels = {finding["check"]: finding["level"] for finding in shown["findings"]}
    assert (levels["shm collective"], levels["gloo collective"]) == ("ok", "ok")
    assert {"cores", "memory", "interfaces", "job key", "versions", "GPUs"} <= levels.keys()


@pytest.mark.needs("sshd")
def test_doctor_tries_a_collective_over_hosts(tmp_path: Path) -> None:
    with ssh_hosts(2, tmp_path) as (made, config):
        words = [*DOCTOR[1:], "--json", "--no-collective", "--limit", str(PATIENCE_S)]
        reached, unknown = (
            made[0].start([*words, "--hosts", hosts, f"--ssh-option=-F{config}"], {})
            for hosts in ("a,b", "a,c")
        )
        found = [json.loads(each.communicate()[0]) for each in (reached, unknown)]
    levels = [next(f["level"] for f in each["findings"] if f["check"] == "hosts") for each in found]
    assert levels == ["ok", "problem"]
    assert unknown.returncode == 1
