"""Jobs on hosts, mostly of two ranks on each of two: ways of launching, kinds of networks."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.comm.namespace_hosts import Host, hosts, variables_of
from tests.hosts import networks
from tests.launch.procs.launching import Launching
from tests.launch.procs.ssh_hosts import front, ssh_hosts
from tests.waiting import PATIENCE_S, until

WAYS = ("static variables", "torchrun", "dure run", "ssh", "etcd")
NETWORKS = ("plain", "IPv6", "Debian's names", "short packets", "lost packets", "other clock")

_ROOT = Path(__file__).parents[2]
_RENDEZVOUS_PORT, _ETCD_PORT = 29400, 2379


@dataclass
class HostJob:
    """What runs on which host (0 or 1), and the file with all that it prints.

    With ssh there is one process, on host 0: it starts the launchers of both.
    """

    hosts: list[Host]
    folder: Path
    programs: list[tuple[int, list[str], dict[str, str]]] = field(default_factory=list)
    """What can be started: on which host, arguments of Python, its variables."""
    processes: list[tuple[int, subprocess.Popen[str], Path]] = field(default_factory=list)

    def start(self, *nodes: int) -> None:
        """Start the programs of these hosts."""
        for node, program, variables in self.programs:
            if node in nodes:
                output = self.folder / f"{len(self.processes)}.txt"
                with output.open("w") as file:
                    process = self.hosts[node].start(program, variables, file)
                self.processes.append((node, process, output))

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

    def ranks_of(self, host: str) -> list[int]:
        """Return the ranks of a host that have made steps: hosts are numbered as they join."""
        return sorted({rank for _, name, rank in self.steps() if name == host})

    def kill_rank(self, rank: int, host: int) -> None:
        """Kill a rank of `reducing`, by the number that its process has on its host."""
        pid = (self.folder / f"up {rank}").read_text()
        assert self.hosts[host].start_any(["kill", "-KILL", pid], {}).wait() == 0

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
        num_hosts: int = 2,
        each: int = 2,
        later: Sequence[int] = (),
        **variables: str,
    ) -> HostJob:
        """Start a job.

        Args:
            way: One of `WAYS`, or "elastic": `dure run --elastic`.
            network: One of `NETWORKS`.
            nnodes: How many hosts `dure run` is to start with, and may have.
            beside: Another job, not over ssh, whose hosts and key it has, too.
            port: Where launchers rendezvous.
            num_hosts: How many hosts to make.
            each: How many ranks each has.
            later: The hosts, by number, on which `HostJob.start` is to start something later.
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
            made, config = self.stack.enter_context(ssh_hosts(num_hosts, folder, name=folder.name))
        else:
            made = self.stack.enter_context(hosts(num_hosts, folder.name))
            config = folder
            _set_up(made, network, folder)
        called = made[0].name if network == "Debian's names" else made[0].address
        variables = self._launched.variables | {"PYTHONPATH": str(_ROOT)} | variables
        job = HostJob(made, folder)
        words = ["-m", self._module, str(folder), *self._words]
        if way == "ssh":
            exports = [f"-x{name}" for name in variables]
            output = folder / "front.txt"
            more = ["--nproc", str(each), *exports, *words]
            with output.open("w") as file:
                process = front(made[0], config, "a,b", more, output=file, **variables)
            job.processes.append((0, process, output))
            return job
        world = variables_of(made, each, folder / "key")
        del world["DURE_SILENCE"]
        variables = world | variables
        variables["MASTER_ADDR"] = called
        if way == "etcd":
            variables["DURE_INSECURE"] = "1"  # this etcd has no TLS
            _start_etcd(made[0], folder)
        for node, program, own in _programs(way, made, each, called, words, nnodes, port):
            job.programs.append((node, program, variables | own))
        job.start(*(node for node in range(num_hosts) if node not in later))
        return job

    def start_reducing(
        self,
        way: str,
        network: str = "plain",
        nnodes: str = "2",
        lease_s: int | None = None,
        max_restarts: int = 0,
    ) -> HostJob:
        """Start a job of `reducing`, with both hosts in its first round; wait for its first steps.

        Args:
            way: As for `start`, as are `network` and `nnodes`.
            network: See there.
            nnodes: See there.
            lease_s: How long a lease lasts; None: as long as users' do.
            max_restarts: How often the program may be restarted.
        """
        variables: dict[str, Any] = {"PET_MAX_RESTARTS": str(max_restarts)} if max_restarts else {}
        if ":" in nnodes:
            variables["PET_RDZV_CONF"] = "last_call_timeout=600"
        if lease_s is not None:
            variables["DURE_SILENCE"] = str(lease_s)
        job = self.start(way, network, nnodes, **variables)
        job.wait_until_up()
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
    way: str, made: list[Host], each: int, called: str, words: list[str], nnodes: str, port: int
) -> list[tuple[int, list[str], dict[str, str]]]:
    """Return what to start: on which host, which arguments of Python, with which variables.

    Args:
        way: How.
        made: The hosts.
        each: How many ranks each has.
        called: The name or address by which the first one is known to all.
        words: Arguments of Python that run the job's program.
        nnodes: As for `HostJobs.start`, as is `port`.
    """
    if way == "static variables":
        return [
            (node, words, {"RANK": str(each * node + local), "LOCAL_RANK": str(local)})
            for node in range(len(made))
            for local in range(each)
        ]
    if way == "torchrun":
        run = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(each)]
        run += ["--master-addr", called, "--master-port", str(port)]
        return [(node, [*run, "--node-rank", str(node), *words], {}) for node in range(len(made))]
    run = ["-m", "dure.cli", "run", "--nnodes", nnodes, "--nproc", str(each)]
    if way == "etcd":
        run += ["--rdzv-backend", "etcd", "--rdzv-id", "job"]
        run += ["--rdzv-endpoint", _at(made[0].address, _ETCD_PORT)]
    else:
        assert way in ("dure run", "elastic")
        run += ["--elastic"] if way == "elastic" else []
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
