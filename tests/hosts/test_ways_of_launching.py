"""One job in each way of launching, on hosts of several kinds of networks.

Its program (`job.py`) runs collectives and RPC, and compares DDP and FSDP with one process. All
jobs run at the same time, each on a network of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.comm.namespace_hosts import Host, hosts, variables_of
from tests.hosts import networks
from tests.launch.procs.launching import Finished, Launching
from tests.launch.procs.ssh_hosts import front, ssh_hosts
from tests.waiting import until

pytestmark = pytest.mark.needs("network namespaces", "engine", "compiler")

JOB = ("-m", "tests.hosts.job")
ROOT = Path(__file__).parents[2]
RENDEZVOUS_PORT, ETCD_PORT = 29400, 2379


def at(host: Host, port: int) -> str:
    return f"[{host.address}]:{port}" if ":" in host.address else f"{host.address}:{port}"


class Jobs:
    """The jobs of this module: what was started, and how it ended."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stack = folder, ExitStack()
        self._launched = Launching(folder)
        self._started: dict[str, list] = {}

    def start(self, way: str, network: str) -> None:
        name = f"{way}-{network}"
        folder = self.folder / name
        folder.mkdir()
        if way == "ssh":
            made, config = self.stack.enter_context(ssh_hosts(2, folder))
            words = ["-xPYTHONPATH", "--nproc", "2", *JOB]
            more = {**self._launched.variables, "PYTHONPATH": str(ROOT)}
            self._started[name] = [front(made[0], config, "a,b", words, **more)]
            return
        made = self.stack.enter_context(hosts(2, f"way{len(self._started)}"))
        match network:
            case "IPv6":
                networks.use_ipv6_only(made)
            case "Debian's names":
                networks.give_names(made, folder)
            case "short packets":
                networks.set_mtu(made, 576)
            case "other clock":
                networks.shift_clock(made[1], folder)
            case _:
                assert network == "plain"
        called = made[0].name if network == "Debian's names" else made[0].address
        self._started[name] = self._start(way, made, called, folder)

    def _start(self, way: str, made: Sequence[Host], called: str, folder: Path) -> list:
        """Start a job on hosts; the others call the first one `called`."""
        variables = variables_of(made, 2, folder / "key") | self._launched.variables
        variables |= {"MASTER_ADDR": called, "PYTHONPATH": str(ROOT)}
        meet = f"[{called}]:{RENDEZVOUS_PORT}" if ":" in called else f"{called}:{RENDEZVOUS_PORT}"
        if way == "static variables":
            return [
                host.start(
                    JOB, variables | {"RANK": str(2 * node + place), "LOCAL_RANK": f"{place}"}
                )
                for node, host in enumerate(made)
                for place in range(2)
            ]
        if way == "torchrun":
            words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
            words += ["--master-addr", called, "--master-port", str(RENDEZVOUS_PORT)]
            key = {name: variables[name] for name in ("DURE_JOB_KEY_FILE", "PYTHONPATH")}
            key |= self._launched.variables | {"OMP_NUM_THREADS": "1"}
            return [
                host.start([*words, "--node-rank", str(node), *JOB], key)
                for node, host in enumerate(made)
            ]
        more: list[str] = ["--rdzv-endpoint", meet]
        if way == "etcd":
            variables["DURE_INSECURE"] = "1"  # this etcd has no TLS
            self._start_etcd(made[0], folder)
            more = ["--rdzv-backend", "etcd", "--rdzv-id", "job"]
            more += ["--rdzv-endpoint", at(made[0], ETCD_PORT)]
        return [
            self._launched.start_on(
                host, "--nnodes", "2", "--nproc", "2", *more, *JOB, env=variables
            )
            for host in made
        ]

    def _start_etcd(self, host: Host, folder: Path) -> None:
        url = f"http://{at(host, ETCD_PORT)}"
        words = ["etcd", "--data-dir", str(folder / "etcd"), "--log-level", "error"]
        words += ["--listen-client-urls", url, "--advertise-client-urls", url]
        with (folder / "etcd.txt").open("w") as output:
            host.start_any(words, {}, output)
        until(lambda: host.listens(ETCD_PORT), "etcd")

    def finish(self, way: str, network: str) -> list[Finished]:
        ended = []
        for process in self._started[f"{way}-{network}"]:
            out, err = process.communicate()
            ended.append(Finished(process.returncode, out, err))
        return ended


CASES = [
    ("static variables", "IPv6"),
    ("static variables", "Debian's names"),
    ("static variables", "short packets"),
    ("torchrun", "plain"),
    ("torchrun", "Debian's names"),
    ("dure run", "plain"),
    ("dure run", "IPv6"),
    ("dure run", "Debian's names"),
    ("dure run", "other clock"),
    ("ssh", "plain"),
    pytest.param("etcd", "plain", marks=pytest.mark.needs("etcd")),
    pytest.param("etcd", "IPv6", marks=[pytest.mark.needs("etcd"), pytest.mark.slow]),
]


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory) -> Iterator[Jobs]:
    """Start the jobs of all tests that run."""
    made = Jobs(tmp_path_factory.mktemp("jobs"))
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    with made.stack:
        for each in chosen:
            made.start(each["way"], each["network"])
        yield made


@pytest.mark.parametrize(("way", "network"), CASES)
def test_ranks_compute_what_one_process_computes(way: str, network: str, jobs: Jobs):
    ended = jobs.finish(way, network)
    printed = "\n".join(each.out for each in ended)
    for rank in range(4):
        assert f"rank {rank}: right" in printed, ended
    if way != "torchrun":  # its launchers sometimes fail after their ranks have ended
        assert [each.code for each in ended] == [0] * len(ended), ended
