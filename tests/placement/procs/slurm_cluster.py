"""A Slurm cluster of two nodes on this machine: one controller, two slurmd, all of this test's own.

Everything lies in a folder of the test: configuration, state, logs. The nodes are called n1 and n2,
and the tasks on them, and nobody else, find these names in their /etc/hosts, by a mount that only
they see. Nothing is left of it when the `with` block ends.
"""

import contextlib
import functools
import getpass
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.launch.procs.launching import Finished
from tests.waiting import PATIENCE_S, until

TOOLS = ("slurmctld", "slurmd", "srun", "sinfo", "unshare", "mount")


@functools.cache
def why_not() -> str:
    """Return why there can be no Slurm here; empty if there can."""
    if sys.platform != "linux":
        return "Slurm is Linux's"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian: slurmctld, slurmd, slurm-client)"
    if os.geteuid() != 0:
        return "only root starts a slurmd whose tasks have a name server of their own"
    bad = subprocess.run(
        ["unshare", "--mount", "true"], capture_output=True, check=False
    ).returncode
    return "this container may not make mount namespaces" if bad else ""


CONFIGURATION = """
ClusterName=dure
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
NodeName=n1 NodeAddr=127.0.0.1 NodeHostName={host} Port={ports[1]} CPUs=8 State=UNKNOWN
NodeName=n2 NodeAddr=127.0.0.1 NodeHostName={host} Port={ports[2]} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    configuration: Path

    def run(self, *words: str | os.PathLike[str], **variables: str) -> Finished:
        """Run a command that finds this cluster, to its end."""
        with self.start(*words, **variables) as process:
            out, err = process.communicate(timeout=PATIENCE_S)
        return Finished(process.returncode, out, err)

    def start(self, *words: str | os.PathLike[str], **variables: str) -> subprocess.Popen[str]:
        """Start a command that finds this cluster."""
        return subprocess.Popen(
            words,
            env=_plain(os.environ) | {"SLURM_CONF": str(self.configuration), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _plain(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what tells a rank who it is."""
    told = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in environ.items() if k not in told} | {"OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Run a cluster for the length of a `with` block."""
    configuration = folder / "slurm.conf"
    (folder / "state").mkdir()
    (folder / "hosts").write_text("127.0.0.1 localhost n1\n127.0.0.1 n2\n")
    configuration.write_text(
        CONFIGURATION.format(
            host=socket.gethostname(), user=getpass.getuser(), folder=folder, ports=_free_ports(3)
        )
    )
    mount = f"mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N "
    commands = [["slurmctld", "-D", "-c"]]
    commands += [["unshare", "--mount", "sh", "-c", mount + name] for name in ("n1", "n2")]
    cluster = Slurm(configuration)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for words in commands:
            variables = _plain(os.environ) | {"SLURM_CONF": str(configuration)}
            quiet = subprocess.DEVNULL
            daemons.append(
                subprocess.Popen(words, env=variables, stdin=quiet, stdout=quiet, stderr=quiet)
            )
        _wait_until_idle(cluster, folder)
        yield cluster
    finally:
        _end_jobs(cluster)
        for daemon in daemons:
            daemon.kill()
        for daemon in daemons:
            daemon.wait()


def _end_jobs(cluster: Slurm) -> None:
    """End the jobs that a failed test has left."""

    def ended() -> bool:
        cluster.run("scancel", f"--user={getpass.getuser()}")
        return not cluster.run("squeue", "-h").out

    until(ended, "the end of Slurm's jobs")


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody uses now: Slurm must know them beforehand.

    They lie below those that connections get: who asks again and again for a port up there that
    nobody listens on yet may in the end be given it himself.
    """
    found: list[int] = []
    for port in random.sample(range(10_000, 30_000), 1000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def _wait_until_idle(cluster: Slurm, folder: Path) -> None:
    def idle() -> bool:
        return cluster.run("sinfo", "-h", "-N", "-o", "%T").out.split() == ["idle", "idle"]

    def logs() -> str:
        return "Slurm:\n" + "\n".join(p.read_text()[-1500:] for p in folder.glob("*.log"))

    until(idle, logs)
