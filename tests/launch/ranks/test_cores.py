"""Cores as the kernel's files tell of them, and ranks bound to them: on made-up machines."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dure.errors import UsageError
from dure.launch.ranks.cores import Cpu, Topology, bind, read_topology, share_threads
from dure.launch.show.folding import rank_set as show_cpus
from dure.launch.spec import Numa
from tests.launch.ranks.kernel_files import write


def machine(
    sockets: int = 1, nodes: int = 1, cores: int = 4, smt: int = 1, caches: int = 1
) -> Topology:
    """Return a machine: nodes a socket, cores a node, cpus a core, caches a node.

    As on Linux, a core's second cpu comes after all first ones.
    """
    total = sockets * nodes * cores
    per_cache = cores // caches
    return Topology(
        tuple(
            Cpu(
                number=core + thread * total,
                node=core // cores,
                socket=core // (nodes * cores),
                core=core,
                cache=core // per_cache * per_cache,
            )
            for thread in range(smt)
            for core in range(total)
        )
    )


TWO_SOCKETS = machine(sockets=2, nodes=2, cores=4, smt=2, caches=2)  # 16 cores, 32 cpus
# GPUs share a node's cores even where no rank uses them, as torchrun's do: GPU 3 is one.
GPUS = Topology(machine(sockets=2, cores=4).cpus, gpus=(1, 0, 1, 0))
ONE_GPU = Topology(machine(sockets=2, cores=2).cpus, gpus=(1,))

CASES: list[tuple[Topology, Numa, list[str]]] = [
    (TWO_SOCKETS, "node", ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
    (TWO_SOCKETS, "node", ["0-3,16-19", "8-11,24-27"]),
    (TWO_SOCKETS, "socket", ["0-7,16-23", "8-15,24-31"]),
    (
        TWO_SOCKETS,
        "exclusive",
        ["0-1,16-17", "2-3,18-19", "4-7,20-23", "8-9,24-25", "10-11,26-27", "12-15,28-31"],
    ),
    (TWO_SOCKETS, "core-complex", ["0-1,16-17", "4-5,20-21", "8-9,24-25", "12-13,28-29"]),
    (machine(cores=5), "exclusive", ["0-2", "3-4"]),
    (machine(cores=8, caches=2), "core-complex", ["0-3", "4-7", "0-3"]),
    # Cpus 0 and 1 are offline, or not ours: the smaller complex comes second.
    (machine(cores=8, caches=2).only(range(2, 8)), "core-complex", ["4-7", "2-3"]),
    (TWO_SOCKETS.only(range(4, 8)), "socket", ["4-7"] * 3),
    (GPUS, "node", ["4-7", "0-3", "4-7"]),
    (GPUS, "exclusive", ["4-5", "0-1", "6-7"]),
    (ONE_GPU, "node", ["0-1", "2-3"]),  # fewer than ranks: they are spread
]


@pytest.mark.parametrize(("topology", "mode", "expected"), CASES)
def test_ranks_are_bound(topology: Topology, mode: Numa, expected: list[str]) -> None:
    nproc = len(expected)
    assert [show_cpus(bind(topology, mode, rank, nproc)) for rank in range(nproc)] == expected


@pytest.mark.parametrize(
    ("topology", "mode", "nproc"),
    [(machine(cores=2), "exclusive", 3), (ONE_GPU.only([0, 1]), "node", 1)],
)
def test_rank_without_a_core_is_refused(topology: Topology, mode: Numa, nproc: int) -> None:
    with pytest.raises(UsageError):
        bind(topology, mode, nproc - 1, nproc)


@pytest.mark.parametrize(
    ("topology", "mode", "nproc", "quota", "threads"),
    [
        (machine(cores=8, smt=2), None, 2, math.inf, 4),
        (machine(cores=2), None, 8, math.inf, 1),
        (machine(cores=8), None, 2, 3.5, 1),
        (TWO_SOCKETS, "node", 8, math.inf, 2),
        (TWO_SOCKETS, "exclusive", 6, math.inf, 2),
        (TWO_SOCKETS, "node", 2, math.inf, 4),  # half of the machine stays idle
    ],
)
def test_threads_share_the_cores(
    topology: Topology, mode: Numa | None, nproc: int, quota: float, threads: int
) -> None:
    binding = [bind(topology, mode, rank, nproc) for rank in range(nproc)] if mode else []
    cores = min(topology.num_cores, quota)
    assert share_threads(cores, nproc, topology, binding) == threads


def test_machine_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    for number, (core, cache) in {0: ("0,2", "0-2"), 1: ("1", "0-2"), 2: ("0,2", "0-2")}.items():
        place = f"sys/devices/system/cpu/cpu{number}"
        indices = (("Data", 1, core), ("Instruction", 9, core), ("Unified", 3, cache))
        for index, (kind, level, sharing) in enumerate(indices):
            files = {"type": kind, "level": str(level), "shared_cpu_list": sharing}
            write(tmp_path, {f"{place}/cache/index{index}/{k}": v for k, v in files.items()})
        files = {"thread_siblings_list": core, "physical_package_id": "1"}
        write(tmp_path, {f"{place}/topology/{k}": v for k, v in files.items()})
    write(tmp_path, {"sys/devices/system/node/node3/cpulist": "0-1,2,8"})
    found = read_topology(frozenset({0, 2}), root=tmp_path)
    assert found.cpus == (
        Cpu(number=0, node=3, socket=1, core=0, cache=0),
        Cpu(number=2, node=3, socket=1, core=0, cache=0),
    )
    silent = read_topology(frozenset({0, 1}), root=tmp_path / "a kernel that tells nothing")
    assert [silent.num_cores, {cpu.node for cpu in silent.cpus}] == [2, {0}]


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [(None, (0, 1, 1)), ("2,0", (1, 0)), ("GPU-bb", ()), ("0,7,1", (0,)), ("", ()), ("-1", ())],
)
def test_gpus_are_those_that_cuda_will_number(
    tmp_path: Path, visible: str | None, nodes: tuple[int, ...]
) -> None:
    # The kernel says -1 where there is but one node.
    for address, node in (("0000:1a:00.0", "-1"), ("0000:8f:00.0", "1"), ("0000:b7:00.0", "1")):
        gpu = {f"proc/driver/nvidia/gpus/{address}/information": "Model: X"}
        write(tmp_path, gpu | {f"sys/bus/pci/devices/{address}/numa_node": node})
    assert read_topology(frozenset({0}), visible, tmp_path).gpus == nodes
