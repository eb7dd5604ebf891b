"""What the kernel's files say of cores, ranks bound to them, and threads: on made-up machines."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from dure.errors import UsageError
from dure.launch.ranks.cores import (
    Cpu,
    Topology,
    bind,
    parse_cpus,
    read_topology,
    share_threads,
)
from dure.launch.ranks.limits import available_memory, check_memory, cpu_quota
from dure.launch.ranks.zygote import zygote_for
from dure.launch.show.folding import rank_set as show_cpus
from dure.launch.spec import JobSpec, Numa


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


def bound(topology: Topology, mode: Numa, nproc: int) -> list[str]:
    return [show_cpus(bind(topology, mode, rank, nproc)) for rank in range(nproc)]


TWO_SOCKETS = machine(sockets=2, nodes=2, cores=4, smt=2, caches=2)  # 16 cores, 32 cpus

CASES: list[tuple[Topology, Numa, int, list[str]]] = [
    (TWO_SOCKETS, "node", 4, ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
    (TWO_SOCKETS, "node", 2, ["0-3,16-19", "8-11,24-27"]),
    (TWO_SOCKETS, "socket", 2, ["0-7,16-23", "8-15,24-31"]),
    (TWO_SOCKETS, "exclusive", 4, ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
    (
        TWO_SOCKETS,
        "exclusive",
        6,
        ["0-1,16-17", "2-3,18-19", "4-7,20-23", "8-9,24-25", "10-11,26-27", "12-15,28-31"],
    ),
    (TWO_SOCKETS, "core-complex", 4, ["0-1,16-17", "4-5,20-21", "8-9,24-25", "12-13,28-29"]),
    (machine(cores=4), "node", 2, ["0-3", "0-3"]),
    (machine(cores=5), "exclusive", 2, ["0-2", "3-4"]),
    (machine(cores=2, smt=2), "exclusive", 2, ["0,2", "1,3"]),
    (machine(cores=8, caches=2), "core-complex", 3, ["0-3", "4-7", "0-3"]),
    # Cpus 0 and 1 are offline, or not ours: the smaller complex comes second.
    (machine(cores=8, caches=2).only(range(2, 8)), "core-complex", 2, ["4-7", "2-3"]),
    (TWO_SOCKETS.only(range(4, 8)), "socket", 3, ["4-7"] * 3),
]


@pytest.mark.parametrize(("topology", "mode", "nproc", "expected"), CASES)
def test_ranks_are_bound(topology: Topology, mode: Numa, nproc: int, expected: list[str]) -> None:
    assert bound(topology, mode, nproc) == expected


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("node", ["4-7", "0-3", "4-7"]),
        ("socket", ["4-7", "0-3", "4-7"]),
        # GPUs share a node's cores even where no rank uses them, as torchrun's do: GPU 3 is one.
        ("exclusive", ["4-5", "0-1", "6-7"]),
    ],
)
def test_ranks_follow_their_gpus(mode: Numa, expected: list[str]) -> None:
    topology = Topology(machine(sockets=2, cores=4).cpus, gpus=(1, 0, 1, 0))
    assert bound(topology, mode, 3) == expected


def test_ranks_without_a_gpu_each_are_spread() -> None:
    topology = Topology(machine(sockets=2, cores=2).cpus, gpus=(1,))
    assert bound(topology, "node", 2) == ["0-1", "2-3"]


@pytest.mark.parametrize(
    ("topology", "mode", "nproc"),
    [
        (machine(cores=2), "exclusive", 3),
        (Topology(machine(sockets=2, cores=2).only([0, 1]).cpus, gpus=(1,)), "node", 1),
    ],
)
def test_rank_without_a_core_is_refused(topology: Topology, mode: Numa, nproc: int) -> None:
    with pytest.raises(UsageError):
        bind(topology, mode, nproc - 1, nproc)


@pytest.mark.parametrize(
    ("topology", "mode", "nproc", "quota", "threads"),
    [
        (machine(cores=8), None, 2, math.inf, 4),
        (machine(cores=8, smt=2), None, 2, math.inf, 4),
        (machine(cores=2), None, 8, math.inf, 1),
        (machine(cores=8), None, 2, 3.5, 1),
        (machine(cores=8), None, 1, 0.5, 1),
        (TWO_SOCKETS, "node", 4, math.inf, 4),
        (TWO_SOCKETS, "node", 8, math.inf, 2),
        (TWO_SOCKETS, "exclusive", 6, math.inf, 2),
        (TWO_SOCKETS, "node", 2, math.inf, 4),  # half of the machine stays idle
        (TWO_SOCKETS, "socket", 2, math.inf, 8),
    ],
)
def test_threads_share_the_cores(
    topology: Topology, mode: Numa | None, nproc: int, quota: float, threads: int
) -> None:
    binding = [bind(topology, mode, rank, nproc) for rank in range(nproc)] if mode else []
    cores = min(topology.num_cores, quota)
    assert share_threads(cores, nproc, topology, binding) == threads


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-2,8", {0, 1, 2, 8}), ("5", {5}), ("", set()), ("0,2-3", {0, 2, 3})]
)
def test_lists_of_cpus_are_the_kernels(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text + "\n") == cpus


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def kernel_files(root: Path, topology: Topology) -> None:
    """Write what the kernel would show of a machine."""
    nodes: dict[int, list[int]] = {}
    for cpu in topology.cpus:
        nodes.setdefault(cpu.node, []).append(cpu.number)
        place = f"sys/devices/system/cpu/cpu{cpu.number}"
        siblings = show_cpus(x.number for x in topology.cpus if x.core == cpu.core)
        sharing = show_cpus(x.number for x in topology.cpus if x.cache == cpu.cache)
        write(
            root,
            {
                f"{place}/topology/thread_siblings_list": siblings,
                f"{place}/topology/physical_package_id": str(cpu.socket),
                f"{place}/cache/index0/type": "Data",
                f"{place}/cache/index0/level": "1",
                f"{place}/cache/index0/shared_cpu_list": siblings,
                f"{place}/cache/index1/type": "Instruction",
                f"{place}/cache/index1/level": "9",
                f"{place}/cache/index1/shared_cpu_list": siblings,
                f"{place}/cache/index3/type": "Unified",
                f"{place}/cache/index3/level": "3",
                f"{place}/cache/index3/shared_cpu_list": sharing,
            },
        )
    for node, cpus in nodes.items():
        write(root, {f"sys/devices/system/node/node{node}/cpulist": show_cpus(cpus)})


def test_machine_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    kernel_files(tmp_path, TWO_SOCKETS)
    assert read_topology(frozenset(range(32)), root=tmp_path) == TWO_SOCKETS
    assert TWO_SOCKETS.num_cores == 16
    some = read_topology(frozenset({3, 5}), root=tmp_path)
    assert some == TWO_SOCKETS.only([3, 5])


def test_kernel_that_tells_nothing_has_one_node(tmp_path: Path) -> None:
    topology = read_topology(frozenset({0, 1}), root=tmp_path)
    assert bound(topology, "exclusive", 2) == ["0", "1"]


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        (None, (0, 1, 1)),
        ("2,0", (1, 0)),
        ("GPU-bb", ()),  # by UUID: not looked up
        ("0,7,1", (0,)),
        ("", ()),
        ("-1", ()),
    ],
)
def test_gpus_are_those_that_cuda_will_number(
    tmp_path: Path, visible: str | None, nodes: tuple[int, ...]
) -> None:
    # The kernel says -1 where there is but one node.
    for address, node in (("0000:1a:00.0", "-1"), ("0000:8f:00.0", "1"), ("0000:b7:00.0", "1")):
        write(
            tmp_path,
            {
                f"proc/driver/nvidia/gpus/{address}/information": "Model: X",
                f"sys/bus/pci/devices/{address}/numa_node": node,
            },
        )
    assert read_topology(frozenset({0}), visible, tmp_path).gpus == nodes


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, math.inf),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/x\n1:name=systemd:/",
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
    ],
)
def test_quota_is_the_lowest_on_the_way(
    tmp_path: Path, files: dict[str, str], quota: float
) -> None:
    write(tmp_path, files)
    assert cpu_quota(tmp_path) == quota


MEMORY = {
    "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:  2000 kB",
    "proc/self/cgroup": "0::/a/b",
    "sys/fs/cgroup/a/memory.max": "1200000",
    "sys/fs/cgroup/a/memory.current": "1000000",
    "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 300000",
    "sys/fs/cgroup/a/b/memory.max": "max",
    "sys/fs/cgroup/a/b/memory.current": "1000000",
}


@pytest.mark.parametrize(
    ("changed", "available"),
    [
        ({}, 500_000),  # what group a leaves: 1.2 MB - 1.0 MB, and pages of files
        ({"sys/fs/cgroup/a/memory.max": "max"}, 2000 * 1024),
        (
            {
                "proc/self/cgroup": "7:memory:/x",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "300000",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "400000",
            },
            0,
        ),
        ({"proc/meminfo": "", "proc/self/cgroup": ""}, None),
    ],
)
def test_available_memory_is_what_the_tightest_limit_leaves(
    tmp_path: Path, changed: dict[str, str], available: int | None
) -> None:
    write(tmp_path, MEMORY | changed)
    assert available_memory(tmp_path) == available


@pytest.mark.parametrize(
    ("nproc", "torch", "forked", "refused"),
    [
        (16, True, True, False),  # 60 MB each
        (18, True, True, True),
        (4, True, False, False),  # 250 MB each
        (5, True, False, True),
        (80, False, False, False),  # 12 MB each
        (90, False, False, True),
    ],
)
def test_ranks_that_memory_cannot_hold_are_refused(
    monkeypatch: pytest.MonkeyPatch, nproc: int, torch: bool, forked: bool, refused: bool
) -> None:
    monkeypatch.setattr("dure.launch.ranks.limits.available_memory", lambda: 1024 << 20)
    spec = JobSpec(program="train.py", nproc=nproc)
    if refused:
        with pytest.raises(UsageError, match=f"{nproc} ranks.*--oversubscribe"):
            check_memory(spec, torch=torch, forked=forked)
    else:
        check_memory(spec, torch=torch, forked=forked)
    check_memory(dataclasses.replace(spec, oversubscribe=True), torch=torch, forked=forked)


def test_more_ranks_than_memory_holds_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import torch")
    monkeypatch.setattr("dure.launch.ranks.limits.available_memory", lambda: 1024 << 20)
    monkeypatch.setattr("subprocess.Popen", None)  # as nothing is started
    spec = JobSpec(program=str(tmp_path / "train.py"), nproc=18)
    with pytest.raises(UsageError, match="60 MB each"), zygote_for(spec, "a-job", None):
        pass
    spec = dataclasses.replace(spec, nproc=5, zygote="never")
    with pytest.raises(UsageError, match="250 MB each"), zygote_for(spec, "a-job", None):
        pass
