"""Threads and cpus of ranks: on made-up machines."""

import math
import os
from pathlib import Path

import pytest

from dure.launch.ranks import child, cores
from dure.launch.ranks.cores import binding_of, num_cores, parse_cpus, threads_for
from dure.launch.spec import JobSpec, Numa
from tests.launch.ranks.kernel_files import write


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of two nodes, each of 4 cores with two threads; the last two cores are closed."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: parse_cpus("0-5,8-13"))
    monkeypatch.setattr(cores, "cpu_quota", lambda: math.inf)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cpu in range(16):
        file = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(tmp_path, {file: f"{cpu % 8},{cpu % 8 + 8}"})
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        write(tmp_path, {f"sys/devices/system/node/node{node}/cpulist": cpus})
    return tmp_path


def test_cores_are_counted_once_for_all_their_threads(machine: Path) -> None:
    assert num_cores(machine) == 6
    assert num_cores(machine / "a kernel without these files") == 12


@pytest.mark.parametrize(
    ("nproc", "numa", "quota", "threads"),
    [
        (2, None, math.inf, 3),
        (2, None, 3.5, 1),
        (8, None, math.inf, 1),
        (1, None, math.inf, None),
        (1, "node", math.inf, 3),  # half of the machine stays idle
    ],
)
def test_threads_share_the_cores(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    nproc: int,
    numa: Numa | None,
    quota: float,
    threads: int | None,
) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert threads_for(JobSpec(program="p", nproc=nproc, numa=numa), machine) == threads


def test_number_of_threads_that_the_user_has_chosen_stays(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert threads_for(JobSpec(program="p", nproc=2, env={"OMP_NUM_THREADS": None})) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads_for(JobSpec(program="p", nproc=2)) is None


def test_ranks_are_spread_over_the_nodes_where_there_are_no_gpus(machine: Path) -> None:
    spec = JobSpec(program="p", nproc=3, numa="node")
    first, second = "0,1,2,3,8,9,10,11", "4,5,12,13"
    assert [binding_of(spec, rank, machine) for rank in range(3)] == [first, first, second]
    without_nodes = machine / "a kernel without these files"
    assert binding_of(spec, 2, without_nodes) == "0,1,2,3,4,5,8,9,10,11,12,13"
    (machine / "proc/driver/nvidia/gpus").mkdir(parents=True)
    assert binding_of(spec, 2, machine) == "node:2"


def test_rank_applies_the_binding_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = pytest.importorskip("torch.numa.binding")
    calls: list[tuple[int, str]] = []

    def apply(*, gpu_index: int, numa_options: object) -> None:
        calls.append((gpu_index, numa_options.affinity_mode.value))  # pyright: ignore

    monkeypatch.setattr(binding, "_maybe_apply_numa_binding_to_current_process", apply)
    child._bind(binding_of(JobSpec(program="p", nproc=4, numa="core-complex"), 3))
    assert calls == [(3, "core-complex")]
