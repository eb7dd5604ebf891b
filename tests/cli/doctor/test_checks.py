"""Checks of `dure doctor` on machines that are made up by replacing what they read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dure.cli.doctor import checks
from dure.cli.doctor.checks import Findings, Gpu, Level
from dure.cli.version import checkout_note

GIB = 1 << 30
OK, NOTE, WARNING, PROBLEM = Level.OK, Level.NOTE, Level.WARNING, Level.PROBLEM
CARD = Gpu("0", "H", "550", 80_000, 10)
TORCH: dict[str, Any] = {"torch": "2.13.0", "cuda": "12.8", "gpus": ["H"], "apart": []}


def worst(findings: Findings) -> Level:
    """Return the worst level; every finding but the good ones has advice."""
    found = list(findings)
    assert all(bool(each.advice) is (each.level is not OK) for each in found)
    return max((each.level for each in found), key=list(Level).index)


def gives(value: object) -> Callable[..., Any]:
    return lambda *_: value


@pytest.mark.parametrize(
    ("usable", "quota", "load", "level"),
    [
        (8, math.inf, 0.3, OK),
        (8, 8.0, 0.3, OK),
        (2, math.inf, 0.3, WARNING),
        (8, 1.5, 0.3, WARNING),
        (8, math.inf, 6.0, WARNING),
        (8, 2.0, 1.5, WARNING),
    ],
)
def test_cores(
    usable: int, quota: float, load: float, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", gives(8))
    monkeypatch.setattr(checks, "usable_cores", gives(usable))
    monkeypatch.setattr(checks, "cpu_quota", gives(quota))
    monkeypatch.setattr(os, "getloadavg", gives((load, load, load)))
    assert worst(checks.cores()) is level


@pytest.mark.parametrize(
    ("free", "left", "shm", "level"),
    [
        (50 * GIB, None, 30 * GIB, OK),
        (50 * GIB, 40 * GIB, 30 * GIB, OK),
        (100 << 20, None, 30 * GIB, PROBLEM),
        (GIB, None, 30 * GIB, WARNING),
        (50 * GIB, 1000, 30 * GIB, PROBLEM),
        (50 * GIB, None, 64 << 20, WARNING),
    ],
)
def test_memory(
    free: int, left: int | None, shm: int, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SimpleNamespace(total=64 * GIB, available=free)
    monkeypatch.setattr(checks.psutil, "virtual_memory", gives(seen))
    monkeypatch.setattr(checks, "available_memory", gives(left))
    monkeypatch.setattr(checks.shutil, "disk_usage", gives((32 * GIB, 0, shm)))
    assert worst(checks.memory()) is level


def test_shared_memory_that_is_refused_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    assert worst(checks.sharing()) in (OK, WARNING)  # ptrace may be for root alone here
    for owner, name in ((checks, "memory_file"), (checks, "open_peer"), (os, "pidfd_open")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, refused)
            assert worst(checks.sharing()) is PROBLEM, name


def interface(*addresses: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(family=checks.socket.AF_INET, address=each) for each in addresses]


LO, ETH, IB = interface("127.0.0.1"), interface("10.0.0.2"), interface("10.1.0.2")


@pytest.mark.parametrize(
    ("up", "chosen", "resolved", "level"),
    [
        ({"lo": LO, "eth0": ETH}, {}, ["10.0.0.2"], OK),
        ({"lo": LO}, {}, ["127.0.1.1"], OK),
        ({"lo": LO, "eth0": ETH, "docker0": interface("172.17.0.1")}, {}, ["10.0.0.2"], OK),
        ({"lo": LO, "eth0": ETH, "ib0": IB}, {}, ["10.0.0.2"], NOTE),
        ({"lo": LO, "eth0": ETH}, {"GLOO_SOCKET_IFNAME": "ib0"}, ["10.0.0.2"], PROBLEM),
        ({"lo": LO, "eth0": ETH}, {"NCCL_SOCKET_IFNAME": "=eth0"}, ["10.0.0.2"], OK),
        ({"lo": LO, "eth0": ETH}, {"NCCL_SOCKET_IFNAME": "^docker"}, ["10.0.0.2"], OK),
        ({"lo": LO, "eth0": ETH}, {}, ["127.0.1.1"], NOTE),
        ({"lo": LO, "eth0": ETH}, {}, [], NOTE),
        ({"lo": LO, "eth0": ETH}, {}, ["10.9.9.9"], WARNING),
    ],
)
def test_network(
    up: dict[str, list[SimpleNamespace]],
    chosen: dict[str, str],
    resolved: list[str],
    level: Level,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = dict.fromkeys(up, SimpleNamespace(isup=True))
    monkeypatch.setattr(checks.psutil, "net_if_addrs", gives(up))
    monkeypatch.setattr(checks.psutil, "net_if_stats", gives(stats))
    monkeypatch.setattr(checks.socket, "gethostbyname_ex", gives(("", [], resolved)))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert worst(checks.network()) is level


def test_a_job_key_that_others_can_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(path))
    assert worst(checks.keys()) is PROBLEM  # no such file
    path.write_bytes(bytes(32))
    path.chmod(0o600)
    assert worst(checks.keys()) is OK
    path.chmod(0o644)
    assert worst(checks.keys()) is PROBLEM
    path.chmod(0o600)
    monkeypatch.setenv("DURE_INSECURE", "1")
    assert worst(checks.keys()) is WARNING


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, OK),
        ({"WORLD_SIZE": "2"}, WARNING),
        ({"WORLD_SIZE": "2", "DURE_LAUNCHER": "j"}, OK),
        ({"OMP_NUM_THREADS": "9"}, WARNING),
        ({"DURE_BACKED": "shm"}, WARNING),
    ],
)
def test_environment(
    variables: dict[str, str], level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "usable_cores", gives(4))
    for name in (*checks.RANK_VARIABLES, "DURE_LAUNCHER", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert worst(checks.environment()) is level


@pytest.mark.parametrize(
    ("parent", "level"), [(1, WARNING), (77, OK)], ids=["launcher is gone", "runs"]
)
def test_leftovers(parent: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    uids = SimpleNamespace(real=os.getuid())
    info = {"pid": 9, "environ": {"DURE_LAUNCHER": "j"}, "uids": uids, "ppid": parent}
    rank = SimpleNamespace(pid=9, info=info | {"name": "python", "create_time": 0.0})
    monkeypatch.setattr(checks.psutil, "process_iter", gives([rank]))
    assert worst(checks.leftovers()) is level


@pytest.mark.parametrize(
    ("packages", "kernel", "level"),
    [
        ({"torch": "2.13.0a0"}, "6.1.0", OK),
        ({}, "6.1.0", PROBLEM),
        ({"torch": "2.4.1+cu1"}, "6.1.0", PROBLEM),
        ({"torch": "2.14.0"}, "6.1.0", WARNING),
        ({"torch": "2.13.0"}, "4.18.0-el8", WARNING),
    ],
)
def test_versions(
    packages: dict[str, str], kernel: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in packages:
            raise checks.metadata.PackageNotFoundError
        return packages[name]

    monkeypatch.setattr(checks.metadata, "version", version)
    monkeypatch.setattr(checks.platform, "release", gives(kernel))
    monkeypatch.setattr(checks, "commit", gives("none"))
    assert worst(checks.versions()) is level


@pytest.mark.parametrize(
    ("version", "at", "differs"),
    [
        ("0.2.0.dev20261128+g5d4b20e5.dirty", "5d4b20e5-dirty", False),
        ("0.2.0.dev20261128+g5d4b20e5.dirty", "1a2b3c4-dirty", True),
        ("0.2.0", "1a2b3c4", False),
        ("0.2.0.dev20261128+g5d4b20e5", "none", False),
    ],
)
def test_a_checkout_at_another_commit_is_noted(version: str, at: str, differs: bool) -> None:
    assert bool(checkout_note(version, at)) is differs


@pytest.mark.parametrize(
    ("cards", "error", "torch", "level"),
    [
        ([CARD], "", TORCH, OK),
        ([], "", {}, OK),
        ([CARD], "", TORCH | {"cuda": None, "gpus": []}, WARNING),
        ([CARD], "", TORCH | {"gpus": []}, PROBLEM),
        ([CARD, CARD._replace(number="1")], "", TORCH, WARNING),
        ([CARD], "", TORCH | {"apart": [[0, 1]]}, WARNING),
        ([CARD._replace(used_mib=70_000)], "", TORCH, WARNING),
        ([CARD._replace(mode="Exclusive_Process")], "", TORCH, WARNING),
        ([], "version mismatch", {}, PROBLEM),
    ],
)
def test_gpus(
    cards: list[Gpu],
    error: str,
    torch: dict[str, Any],
    level: Level,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(checks, "nvidia_cards", gives((cards, error)))
    assert worst(checks.gpus(torch)) is level
