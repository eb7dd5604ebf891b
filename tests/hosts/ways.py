"""Jobs of two ranks on each of two hosts: every way of launching, several kinds of networks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.comm.namespace_hosts import Host, hosts, variables_of
from tests.hosts import networks
from tests.launch.procs.launching import Launching
from tests.launch.procs.ssh_hosts import front, ssh_hosts
from tests.waiting import PATIENCE_S, until

WAYS = ("static variables", "torchrun", "dure run", "ssh", "etcd")
NETWORKS = ("plain", "IPv6", "Debian's names", "short packets", "lost packets", "other clock")

_ROOT = Path(__file__).parents[2]
_EACH = 2
_RENDEZVOUS_PORT, _ETCD_PORT = 29400, 2379


@dataclass
class HostJob:
    """What runs on which host (0 or 1), and the file with all that it prints.

    With ssh there is one process, on host 0: it starts the launchers of both.
    """

    hosts: list[Host]
    folder: Path
    processes: list[tuple[int, subprocess.Popen[str], Path]] = field(default_factory=list)

    def codes(self, host: int | None = None) -> list[int]:
        """Wait for the ends of what was started on a host, or on both; return the exit codes."""
        found = [each for each in self.processes if host in (None, each[0])]
        return [process.wait(PATIENCE_S) for _, process, _ in found]

    def printed(self, host: int | None = None) -> str:
        """Return all that was printed so far on a host, or on both."""
        found = [each for each in self.processes if host in (None, each[0])]
        return "\n".join(path.read_text() for _, _, path in found)

    def wait_for(self, done: Callable[[], object], what: str) -> None:
        """Wait for something to be true."""
        until(done, lambda: f"{what}\n{self.printed()}")

    def wait_until_up(self, num_ranks: int = 4) -> None:
        """Wait until ranks of `reducing` have reduced."""
        self.wait_for(lambda: len(list(self.folder.glob("up *"))) == num_ranks, "ranks that reduce")

    def steps(self) -> list[tuple[int, str, int]]:
        """Return the steps of `reducing` as they were made: round, host, rank."""
        path = self.folder / "steps"
        words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(number), host, int(rank)) for number, host, rank in words]

    def wait_for_round(self, number: int) -> None:
        """Wait until ranks of `reducing` have made steps in a round."""
        self.wait_for(lambda: any(n == number for n, _, _ in self.steps()), f"round {number}")

    def kill(self, host: int, *words: str) -> None:
        """Kill the process on a host whose command line has all the words; there must be one."""
        lines = [line for line in self.hosts[host].inside() if " nsenter " not in line]
        found = [line for line in lines if all(word in line for word in words)]
        assert len(found) == 1, found
        os.kill(int(found[0].split()[0]), signal.SIGKILL)


class HostJobs:
    """Starts jobs, each on two hosts of its own; `stack` ends them.

    Args:
        folder: For their files.
        module: What every rank runs; its first argument is the folder of its job.
        *words: Its further arguments.
    """

    def __init__(self, folder: Path, module: str, *words: str) -> None:
        self._folder, self._module, self._words = folder, module, words
        self.stack, self._launched, self._num_started = ExitStack(), Launching(folder), 0

    def start(
        self,
        way: str,
        network: str = "plain",
        nnodes: str = "2",
        beside: HostJob | None = None,
        port: int = _RENDEZVOUS_PORT,
        **variables: str,
    ) -> HostJob:
        """Start a job.

        Args:
            way: One of `WAYS`.
            network: One of `NETWORKS`.
            nnodes: How many hosts `dure run` is to start with, and may have.
            beside: Another job, not over ssh, whose hosts and key it has, too.
            port: Where launchers rendezvous.
            variables: More of the ranks' environment. Without a DURE_SILENCE there, leases last as
                long as users' do: a thread of a busy machine may have to wait for seconds.
        """
        self._num_started += 1
        folder = self._folder / f"job{self._num_started}"
        folder.mkdir()
        if beside is not None:
            made, config = beside.hosts, folder
            (folder / "key").hardlink_to(beside.folder / "key")
        elif way == "ssh":
            assert network == "plain"
            made, config = self.stack.enter_context(ssh_hosts(2, folder, name=folder.name))
        else:
            made = self.stack.enter_context(hosts(2, folder.name))
            config = folder
            _set_up(made, network, folder)
        called = made[0].name if network == "Debian's names" else made[0].address
        variables = self._launched.variables | {"PYTHONPATH": str(_ROOT)} | variables
        job = HostJob(made, folder)
        words = ["-m", self._module, str(folder), *self._words]
        if way == "ssh":
            exports = [f"-x{name}" for name in variables]
            output = folder / "front.txt"
            more = ["--nproc", str(_EACH), *exports, *words]
            with output.open("w") as file:
                process = front(made[0], config, "a,b", more, output=file, **variables)
            job.processes.append((0, process, output))
            return job
        world = variables_of(made, _EACH, folder / "key")
        del world["DURE_SILENCE"]
        variables = world | variables
        variables["MASTER_ADDR"] = called
        if way == "etcd":
            variables["DURE_INSECURE"] = "1"  # this etcd has no TLS
            _start_etcd(made[0], folder)
        for node, program, own in _programs(way, made, called, words, nnodes, port):
            output = folder / f"{len(job.processes)}.txt"
            with output.open("w") as file:
                process = made[node].start(program, variables | own, file)
            job.processes.append((node, process, output))
        return job

    def check_nothing_left(self) -> None:
        """Wait until no process of the jobs lives."""
        self._launched.wait_until_gone()


def _set_up(made: list[Host], network: str, folder: Path) -> None:
    match network:
        case "IPv6":
            networks.use_ipv6_only(made)
        case "Debian's names":
            networks.give_names(made, folder)
        case "short packets":
            networks.set_mtu(made, 576)
        case "lost packets":
            networks.lose_packets(made, 0.02)
        case "other clock":
            networks.shift_clock(made[1], folder)
        case _:
            assert network == "plain"


def _programs(
    way: str, made: list[Host], called: str, words: list[str], nnodes: str, port: int
) -> list[tuple[int, list[str], dict[str, str]]]:
    """Return what to start: on which host, which arguments of Python, with which variables.

    Args:
        way: How.
        made: The hosts.
        called: The name or address by which the first one is known to all.
        words: Arguments of Python that run the job's program.
        nnodes: As for `HostJobs.start`, as is `port`.
    """
    if way == "static variables":
        return [
            (node, words, {"RANK": str(_EACH * node + local), "LOCAL_RANK": str(local)})
            for node in range(len(made))
            for local in range(_EACH)
        ]
    if way == "torchrun":
        run = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(_EACH)]
        run += ["--master-addr", called, "--master-port", str(port)]
        return [(node, [*run, "--node-rank", str(node), *words], {}) for node in range(len(made))]
    run = ["-m", "dure.cli", "run", "--nnodes", nnodes, "--nproc", str(_EACH)]
    if way == "etcd":
        run += ["--rdzv-backend", "etcd", "--rdzv-id", "job"]
        run += ["--rdzv-endpoint", _at(made[0].address, _ETCD_PORT)]
    else:
        assert way == "dure run"
        run += ["--rdzv-endpoint", _at(called, port)]
    return [(node, [*run, *words], {}) for node in range(len(made))]


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _start_etcd(host: Host, folder: Path) -> None:
    url = f"http://{_at(host.address, _ETCD_PORT)}"
    words = ["etcd", "--data-dir", str(folder / "etcd"), "--log-level", "error"]
    words += ["--listen-client-urls", url, "--advertise-client-urls", url]
    with (folder / "etcd.txt").open("w") as output:
        host.start_any(words, {}, output)
    until(lambda: host.listens(_ETCD_PORT), "etcd")
