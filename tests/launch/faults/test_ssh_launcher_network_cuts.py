"""`dure run --hosts` over real ssh, whose network is really cut.

Three hosts: a test starts the job on the first, and cuts a cable while the ranks compute. No test
says how fast something is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.comm.namespace_hosts import Host
from tests.launch.procs.ssh_hosts import front, ssh_hosts
from tests.waiting import PATIENCE_S, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("sshd"),
    pytest.mark.needs("engine"),
]

PROGRAM = """
import os, torch, dure
dure.init_process_group()
ones = torch.ones(3)
dure.all_reduce(ones)
print("up", os.environ["RANK"], flush=True)
while True:
    dure.all_reduce(ones.fill_(1))
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable]:
    """Return what starts a job from host a, with one rank on each of its hosts."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = tmp_path / "ssh"
    folder.mkdir()
    with contextlib.ExitStack() as stack:

        def start(nodes: str, *flags: str, sshd: tuple[str, ...] = ()):
            made, config = stack.enter_context(ssh_hosts(3, folder, *sshd))
            process = front(made[0], config, nodes, ["--nproc", "1", *flags, program])
            assert process.stdout is not None
            said = sorted(process.stdout.readline()[-5:-1] for _ in nodes.split(","))
            assert said == ["up 0", "up 1"]
            return made, process

        yield start


def left_on(host: Host) -> list[str]:
    """Return the processes of the job on a host; sshd is the machine's."""
    return [line for line in host.inside() if "sshd" not in line]


def ends_on(hosts: list[Host]) -> None:
    def left() -> list[str]:
        return [line for host in hosts for line in left_on(host)]

    until(lambda: not left(), lambda: f"the end of {left()}")


def test_a_host_whose_cable_is_cut_is_named_and_nothing_is_left_on_either_side(start):
    (a, b, _), process = start("a,b")
    assert left_on(a) and left_on(b)
    b.cut()
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0, said
    assert "lost b" in said or "host b cannot be reached" in said, said
    ends_on([a, b])


def test_a_front_that_is_cut_off_from_its_hosts_names_one_and_all_end_where_sshd_asks(start):
    (a, b, c), process = start("b,c", sshd=("ClientAliveInterval 5",))
    a.cut()
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 255, said
    assert "host b cannot be reached" in said or "host c cannot be reached" in said, said
    ends_on([a, b, c])
