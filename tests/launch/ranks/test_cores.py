"""Cores as the kernel's files describe them, and ranks bound to them: on made-up machines."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dure.errors import UsageError
from dure.launch.ranks import child, cores
from dure.launch.ranks.cores import (
    Cpu,
    Topology,
    bind,
    binding_of,
    read_topology,
    share_threads,
    threads_for,
)
from dure.launch.show.folding import rank_set as show_cpus
from dure.launch.spec import JobSpec
from tests.launch.ranks.kernel_files import write


def machine(nodes: int = 1, cores: int = 4, smt: int = 1) -> Topology:
    """Return a machine: cores per node, cpus per core.

    As on Linux, a core's second cpu comes after all first ones.
    """
    total = nodes * cores
    return Topology(
        tuple(
            Cpu(number=core + thread * total, node=core // cores, core=core)
            for thread in range(smt)
            for core in range(total)
        )
    )


FOUR_NODES = machine(nodes=4, cores=4, smt=2)  # 16 cores, 32 cpus
# GPUs share a node's cores even if no rank uses them, as torchrun's do: GPU 3 is one.
GPUS = Topology(machine(nodes=2, cores=4).cpus, gpus=(1, 0, 1, 0))
ONE_GPU = Topology(machine(nodes=2, cores=2).cpus, gpus=(1,))

CASES: list[tuple[Topology, list[str]]] = [
    (FOUR_NODES, ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
    (FOUR_NODES, ["0-3,16-19", "8-11,24-27"]),
    (FOUR_NODES.only(range(4, 8)), ["4-7"] * 3),
    (GPUS, ["4-7", "0-3", "4-7"]),
    (ONE_GPU, ["0-1", "2-3"]),  # fewer than ranks: they are spread
]


@pytest.mark.parametrize(("topology", "expected"), CASES)
def test_ranks_are_bound_to_a_node(topology: Topology, expected: list[str]) -> None:
    nproc = len(expected)
    assert [show_cpus(bind(topology, rank, nproc)) for rank in range(nproc)] == expected


def test_rank_without_a_core_is_refused() -> None:
    with pytest.raises(UsageError, match="no core is left"):
        bind(ONE_GPU.only([0, 1]), 0, 1)


@pytest.mark.parametrize(
    ("topology", "numctl", "binding"),
    [(GPUS, "/bin/numactl", "exclusive:1"), (GPUS, None, None), (ONE_GPU, "/bin/numactl", None)],
)
def test_bindings_of_torch_need_gpus_and_numactl(
    monkeypatch: pytest.MonkeyPatch, topology: Topology, numctl: str | None, binding: str | None
) -> None:
    monkeypatch.setattr(cores, "_topology", lambda spec: topology)  # pyright: ignore
    monkeypatch.setattr("shutil.which", lambda name: numctl)  # pyright: ignore
    spec = JobSpec(program="p", nproc=2, numa="exclusive")
    if binding is None:
        with pytest.raises(UsageError, match="exclusive needs a GPU for each rank"):
            threads_for(spec)
    else:
        assert binding_of(spec, 1) == binding


def test_rank_applies_the_binding_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = pytest.importorskip("torch.numa.binding")
    calls: list[tuple[int, str]] = []

    def apply(*, gpu_index: int, numa_options: object) -> None:
        calls.append((gpu_index, numa_options.affinity_mode.value))  # pyright: ignore

    monkeypatch.setattr(binding, "_maybe_apply_numa_binding_to_current_process", apply)
    child._bind("core-complex:3")
    assert calls == [(3, "core-complex")]


@pytest.mark.parametrize(
    ("topology", "bound", "nproc", "quota", "threads"),
    [
        (machine(cores=8, smt=2), False, 2, math.inf, 4),
        (machine(cores=2), False, 8, math.inf, 1),
        (machine(cores=8), False, 2, 3.5, 1),
        (FOUR_NODES, True, 8, math.inf, 2),
        (FOUR_NODES, True, 2, math.inf, 4),  # half of the machine stays idle
    ],
)
def test_threads_share_the_cores(
    topology: Topology, bound: bool, nproc: int, quota: float, threads: int
) -> None:
    binding = [bind(topology, rank, nproc) for rank in range(nproc)] if bound else []
    assert share_threads(min(topology.num_cores, quota), nproc, topology, binding) == threads


def test_machine_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    for number, core in {0: "0,2", 1: "1", 2: "0,2"}.items():
        place = f"sys/devices/system/cpu/cpu{number}"
        write(tmp_path, {f"{place}/topology/thread_siblings_list": core})
    write(tmp_path, {"sys/devices/system/node/node3/cpulist": "0-1,2,8"})
    found = read_topology(frozenset({0, 2}), root=tmp_path)
    assert found.cpus == (Cpu(number=0, node=3, core=0), Cpu(number=2, node=3, core=0))
    silent = read_topology(frozenset({0, 1}), root=tmp_path / "a kernel without these files")
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
