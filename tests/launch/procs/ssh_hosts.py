"""Hosts that can be reached by ssh: network namespaces (`comm.namespace_hosts`), with sshd in each.

All keys, and what ssh knows of the hosts, lie in a folder of the test. A host is called by its
name, a or b, which only this ssh configuration knows.
"""

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import psutil

from tests.comm.namespace_hosts import Host, hosts
from tests.comm.namespace_hosts import why_not as why_no_hosts

SSHD = "/usr/sbin/sshd"


@functools.cache
def why_not() -> str:
    """Return why there can be no hosts with ssh here; empty if there can."""
    if why_no_hosts():
        return why_no_hosts()
    missing = [tool for tool in (SSHD, "ssh", "ssh-keygen") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found (Debian: openssh-server)" if missing else ""


@contextlib.contextmanager
def ssh_hosts(
    count: int, folder: Path, *settings: str, name: str = ""
) -> Iterator[tuple[list[Host], Path]]:
    """Make hosts with an sshd each; yield them, and the file for `ssh -F`.

    Args:
        count: How many.
        folder: Where the keys and settings go.
        settings: More lines for sshd's settings.
        name: Of their network, as for `hosts`.
    """
    folder.chmod(0o700)
    for side in ("client", "server"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / side]
        subprocess.run(words, check=True)
    os.makedirs("/run/sshd", exist_ok=True)  # sshd insists on it
    server_config = folder / "sshd_config"
    server_config.write_text(
        f"HostKey {folder / 'server'}\nAuthorizedKeysFile {folder / 'client.pub'}\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\n" + "".join(f"{line}\n" for line in settings)
    )
    with hosts(count, name) as made:
        for host in made:
            sshd = host.start_any([SSHD, "-D", "-e", "-f", server_config], {})
            while "listening" not in (line := sshd.stderr.readline()):
                assert line, "sshd has ended"
        server = (folder / "server.pub").read_text().split()[:2]
        known = "".join(f"{host.address} {' '.join(server)}\n" for host in made)
        (folder / "known_hosts").write_text(known)
        config = folder / "ssh_config"
        config.write_text(
            "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in made)
            + f"Host *\n  IdentityFile {folder / 'client'}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder / 'known_hosts'}\n  StrictHostKeyChecking yes\n"
            "  User root\n"
        )
        yield made, config


def front(
    host: Host,
    config: Path,
    nodes: str,
    words: Sequence[str | os.PathLike[str]],
    output: IO[str] | int = subprocess.PIPE,
    **more: str,
) -> subprocess.Popen[str]:
    """Start `dure run --hosts NODES` on `host`; both streams go to `output`, or to a pipe each."""
    variables = {"OMP_NUM_THREADS": "1", **more}
    exports = [f"-x{name}" for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ]
    flags = ["--hosts", nodes, f"--ssh-option=-F{config}", *exports]
    return host.start(["-m", "dure.cli", "run", *flags, *words], variables, output)


def number_of(entered: subprocess.Popen[str]) -> int:
    """Return the process that nsenter started; signals to nsenter itself do not reach it."""
    return psutil.Process(entered.pid).children()[0].pid
