"""`dure run --hosts` over real ssh, whose own host is really cut off while the ranks compute.

A host of the job that is cut off is in `hosts.test_faults_by_way`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.procs.ssh_hosts import front, ssh_hosts
from tests.waiting import PATIENCE_S, until

PROGRAM = """
import os, torch, dure
dure.init_process_group()
ones = torch.ones(3)
dure.all_reduce(ones)
print("up", os.environ["RANK"], flush=True)
while True:
    dure.all_reduce(ones.fill_(1))
"""


@pytest.mark.slow
@pytest.mark.needs("sshd", "engine")
def test_a_front_that_is_cut_off_from_its_hosts_names_one_and_all_end_where_sshd_asks(
    tmp_path: Path,
) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "ssh"
    program.write_text(PROGRAM)
    folder.mkdir()
    with ssh_hosts(3, folder, "ClientAliveInterval 5") as (made, config):
        process = front(made[0], config, "b,c", ["--nproc", "1", program])
        assert process.stdout is not None
        assert sorted(process.stdout.readline()[-5:-1] for _ in "bc") == ["up 0", "up 1"]
        made[0].cut()
        _, said = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 255, said
        assert "host b cannot be reached" in said or "host c cannot be reached" in said, said

        def left() -> list[str]:
            """The processes of the job; sshd is the machine's."""
            return [line for host in made for line in host.inside() if "sshd" not in line]

        until(lambda: not left(), lambda: f"the end of {left()}")
