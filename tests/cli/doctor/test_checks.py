"""Checks of `dure doctor` on machines that are made up by replacing what they read."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dure.cli.doctor import checks
from dure.cli.doctor.checks import Finding, Findings, GpuStatus, Level, fine
from dure.cli.doctor.command import run_check
from dure.cli.version import checkout_note

GIB = 1 << 30
OK, NOTE, WARNING, PROBLEM = Level.OK, Level.NOTE, Level.WARNING, Level.PROBLEM


def interfaces(**addresses: str) -> dict[str, list[SimpleNamespace]]:
    family = checks.socket.AF_INET
    return {name: [SimpleNamespace(family=family, address=a)] for name, a in addresses.items()}


LO, ETH = {"lo": "127.0.0.1"}, {"lo": "127.0.0.1", "eth0": "10.0.0.2"}
STATS = dict.fromkeys(("lo", "eth0", "ib0", "docker0"), SimpleNamespace(isup=True))
ORPHAN = {
    **{"pid": 9, "environ": {"DURE_LAUNCHER": "j"}, "uids": SimpleNamespace(real=os.getuid())},
    **{"ppid": 1, "name": "python", "cmdline": []},
}
FIRST = ORPHAN | {"pid": 1, "environ": {}, "ppid": 0, "cmdline": ["python", "-m", "dure.run"]}
CARD = GpuStatus("0", "H", "550", 80_000, 10)
TORCH: dict[str, Any] = {"torch": "2.13.0", "cuda": "12.8", "gpus": ["H"]}
HEALTHY: dict[str, Any] = {
    "os.cpu_count": 8,
    "usable_cores": 8,
    "cpu_quota": math.inf,
    "os.getloadavg": (0.3, 0.3, 0.3),
    "psutil.virtual_memory": SimpleNamespace(total=64 * GIB, available=50 * GIB),
    "available_memory": None,
    "shutil.disk_usage": SimpleNamespace(free=30 * GIB),
    "psutil.net_if_addrs": interfaces(**ETH),
    "psutil.net_if_stats": STATS,
    "socket.gethostbyname_ex": ("", [], ["10.0.0.2"]),
    "psutil.process_iter": [],
    "metadata.version": "2.13.0a0",
    "platform.release": "6.1.0",
    "commit": "none",
    "nvidia_cards": ([CARD], ""),
}


def gpus() -> Findings:
    return checks.gpus(TORCH)


def cpu_torch() -> Findings:
    return checks.gpus(TORCH | {"cuda": None, "gpus": []})


def blind_torch() -> Findings:
    return checks.gpus(TORCH | {"gpus": []})


def orphans(*infos: dict[str, Any]) -> dict[str, Any]:
    return {"psutil.process_iter": [SimpleNamespace(info=info) for info in infos]}


@pytest.mark.parametrize(
    ("check", "changes", "level"),
    [
        *((check, {}, OK) for check in (*checks.CHECKS, gpus) if check is not checks.keys),
        (checks.versions, {"metadata.version": "2.4.1+cu1"}, PROBLEM),
        (checks.versions, {"metadata.version": "2.10.9"}, PROBLEM),
        (checks.versions, {"metadata.version": "2.15.3+cpu"}, OK),
        (checks.versions, {"metadata.version": "2.16.0"}, WARNING),
        (checks.versions, {"platform.release": "4.18.0-el8"}, WARNING),
        (checks.cores, {"cpu_quota": 8.0}, OK),
        (checks.cores, {"usable_cores": 2}, WARNING),
        (checks.cores, {"cpu_quota": 1.5}, WARNING),
        (checks.cores, {"os.getloadavg": (6.0, 6.0, 6.0)}, WARNING),
        (checks.memory, {"available_memory": 40 * GIB}, OK),
        (checks.memory, {"available_memory": GIB}, WARNING),
        (checks.memory, {"available_memory": 1000}, PROBLEM),
        (checks.memory, {"shutil.disk_usage": SimpleNamespace(free=64 << 20)}, WARNING),
        (checks.limits, {"_limit": 100}, PROBLEM),
        (checks.network, {"psutil.net_if_addrs": interfaces(**LO)}, OK),
        (checks.network, {"psutil.net_if_addrs": interfaces(**ETH, docker0="1.2.3.4")}, OK),
        (checks.network, {"psutil.net_if_addrs": interfaces(**ETH, ib0="1.2.3.4")}, NOTE),
        (checks.network, {"GLOO_SOCKET_IFNAME": "ib0"}, PROBLEM),
        (checks.network, {"NCCL_SOCKET_IFNAME": "=eth0"}, OK),
        (checks.network, {"NCCL_SOCKET_IFNAME": "^docker"}, OK),
        (checks.network, {"socket.gethostbyname_ex": ("", [], ["127.0.1.1"])}, NOTE),
        (checks.network, {"socket.gethostbyname_ex": ("", [], [])}, NOTE),
        (checks.environment, {"WORLD_SIZE": "2"}, WARNING),
        (checks.environment, {"WORLD_SIZE": "2", "DURE_LAUNCHER": "j"}, OK),
        (checks.environment, {"OMP_NUM_THREADS": "9"}, WARNING),
        (checks.environment, {"DURE_BACKED": "shm"}, WARNING),
        (checks.leftovers, orphans(ORPHAN), WARNING),
        (checks.leftovers, orphans(ORPHAN | {"ppid": 77}), OK),
        (checks.leftovers, orphans(FIRST, ORPHAN), OK),  # in a container
        (gpus, {"nvidia_cards": ([CARD, CARD], "")}, WARNING),
        (gpus, {"nvidia_cards": ([CARD._replace(used_mib=70_000)], "")}, WARNING),
        (gpus, {"nvidia_cards": ([], "version mismatch")}, PROBLEM),
        (gpus, {"nvidia_cards": ([], "")}, OK),
        (cpu_torch, {}, WARNING),
        (blind_torch, {}, PROBLEM),
    ],
)
def test_check_judges(
    check: Callable[[], Findings],
    changes: dict[str, Any],
    level: Level,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unset = ("DURE_LAUNCHER", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in (*unset, *checks.RANK_VARIABLES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**HEALTHY, **changes}.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.setattr(f"dure.cli.doctor.checks.{name}", lambda *_, v=value: v)
    found = list(check())
    assert all(bool(each.advice) is (each.level is not OK) for each in found)
    assert max((each.level for each in found), key=list(Level).index) is level


def test_a_job_key_that_others_can_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key"
    monkeypatch.setenv("DURE_JOB_KEY_FILE", str(path))
    levels = [next(checks.keys()).level]  # no such file
    path.write_bytes(bytes(32))
    for mode in (0o600, 0o644):
        path.chmod(mode)
        levels.append(next(checks.keys()).level)
    monkeypatch.setenv("DURE_INSECURE", "1")
    levels.append(list(checks.keys())[-1].level)
    assert levels == [PROBLEM, OK, PROBLEM, WARNING]


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


WORKS = [{"backend": name, "ranks": 2, "us": 3.0} for name in ("shm", "gloo")]


@pytest.mark.parametrize(
    ("lines", "levels"),
    [
        (WORKS, [OK, OK]),
        ([{"backend": "shm", "error": "CommTimeout: x"}, WORKS[1]], [PROBLEM, OK]),
        (WORKS[:1], [OK, PROBLEM]),
        ([], [PROBLEM]),  # gloo was not tried
    ],
)
def test_collectives_show_which_backend_fails(
    lines: list[dict[str, Any]], levels: list[Level]
) -> None:
    found = checks.judge(("shm", "gloo"), lines, "exit code 1: no memory")
    assert [finding.level for finding in found] == levels


def test_check_that_fails_is_a_warning_and_ends_no_other() -> None:
    def fails() -> list[Finding]:
        raise PermissionError("/proc/x")

    wanted = {"fails": fails, "works": lambda: [fine("works", "yes")]}
    found = [(f.check, f.level) for name, check in wanted.items() for f in run_check(name, check)]
    assert found == [("fails", WARNING), ("works", OK)]
