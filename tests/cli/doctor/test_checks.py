"""Each check of `dure doctor` on made-up machines."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from dure.cli.doctor import checks
from dure.cli.doctor.checks import Finding, Gpu, Interface, Level, Orphan

GIB = 1 << 30
OK, NOTE, WARNING, PROBLEM = Level.OK, Level.NOTE, Level.WARNING, Level.PROBLEM
LO, ETH = Interface("lo", ("127.0.0.1",)), Interface("eth0", ("10.0.0.2",), 100_000)
IB = Interface("ib0", ("10.1.0.2",))
KEY = Path("/home/me/.config/dure/key")
CARD = Gpu("0", "H", "550", 80_000, 10)
TORCH: dict[str, Any] = {"torch": "2.13.0", "cuda": "12.8", "gpus": ["H"], "apart": []}


def key(mode: int) -> os.stat_result:
    """Return a file of user 7."""
    return os.stat_result((mode, 0, 0, 1, 7, 7, 32, 0, 0, 0))


SECRET = key(0o600)
WELL: dict[Callable[..., Iterable[Finding]], dict[str, Any]] = {
    checks.cores: {"total": 8, "usable": 8, "quota": math.inf, "load": 0.3, "governor": ""},
    checks.memory: {"total": 64 * GIB, "free": 50 * GIB, "swapped": 0, "left": None},
    checks.huge_pages: {"private": "madvise", "shared": ""},
    checks.shm: {"total": 32 * GIB, "free": 30 * GIB, "writable": True},
    checks.engine: {"memfd_error": "", "peer_error": "", "pidfd_error": ""},
    checks.ptrace: {"scope": 0, "container": "", "seccomp": False},
    checks.locked_memory: {"limit": math.inf, "fabric": False},
    checks.files: {"limit": 65536},
    checks.processes: {"limit": math.inf, "running": 80},
    checks.temporary_files: {"free": GIB, "folder": "/tmp"},
    checks.ports: {"first": 32768, "last": 60999, "used": 0, "usual_by": "", "loopback_error": ""},
    checks.interfaces: {"known": [LO, ETH], "default": "eth0", "chosen": {}},
    checks.own_name: {"hostname": "a", "resolved": ["10.0.0.2"], "known": [LO, ETH]},
    checks.look_ups: {"own_s": 0.001, "reverse_s": 0.001},
    checks.clock: {"synchronised": True, "source": "tsc", "read_ns": 40},
    checks.key_file: {"path": KEY, "file": SECRET, "folder_mode": 0o700, "user": 7, "named": False},
    checks.checkout: {"version": "0.2.0.dev20261128+g5d4b20e5.dirty", "commit": "5d4b20e5-dirty"},
    checks.versions: {"python": "3.11.7", "packages": {"torch": "2.13.0a0"}},
    checks.system: {"name": "Linux", "kernel": "6.1.0", "machine": "x86_64"},
    checks.leftovers: {"jobs": 1, "left": []},
    checks.environment: {"variables": {}, "usable": 4, "insecure": False},
    checks.gpus: {"cards": [CARD], "error": "", "torch": TORCH, "hidden": False},
}
"""Of each check: a machine with nothing wrong."""
CASES: list[tuple[Callable[..., Iterable[Finding]], dict[str, Any], Level]] = [
    (checks.cores, {"usable": 2}, WARNING),
    (checks.cores, {"quota": 1.5}, WARNING),
    (checks.cores, {"quota": 8.0}, OK),
    (checks.cores, {"load": 6.0}, WARNING),
    (checks.cores, {"quota": 2.0, "load": 1.5}, WARNING),
    (checks.cores, {"governor": "powersave"}, WARNING),
    (checks.memory, {"free": 100 << 20}, PROBLEM),
    (checks.memory, {"free": GIB}, WARNING),
    (checks.memory, {"left": 1000}, PROBLEM),
    (checks.memory, {"left": 40 * GIB}, OK),
    (checks.memory, {"swapped": 20 * GIB}, WARNING),
    (checks.huge_pages, {"private": "never"}, WARNING),
    (checks.shm, {"free": 64 << 20}, WARNING),
    (checks.shm, {"writable": False}, WARNING),
    (checks.engine, {"memfd_error": "no"}, PROBLEM),
    (checks.engine, {"peer_error": "no"}, PROBLEM),
    (checks.engine, {"pidfd_error": "no"}, PROBLEM),
    (checks.ptrace, {"scope": 1, "container": "docker"}, OK),
    (checks.ptrace, {"scope": 3}, WARNING),
    (checks.locked_memory, {"limit": 64 << 10}, OK),
    (checks.locked_memory, {"limit": 64 << 10, "fabric": True}, PROBLEM),
    (checks.files, {"limit": 512}, WARNING),
    (checks.files, {"limit": 64}, PROBLEM),
    (checks.processes, {"limit": 100}, PROBLEM),
    (checks.processes, {"limit": 512}, WARNING),
    (checks.temporary_files, {"free": 1 << 20}, PROBLEM),
    (checks.ports, {"used": 28_000}, WARNING),
    (checks.ports, {"usual_by": "somebody"}, WARNING),
    (checks.ports, {"loopback_error": "refused"}, PROBLEM),
    (checks.interfaces, {"known": []}, PROBLEM),
    (checks.interfaces, {"known": [LO]}, NOTE),
    (checks.interfaces, {"known": [LO, ETH, IB]}, NOTE),
    (checks.interfaces, {"known": [LO, ETH, Interface("docker0", ("172.17.0.1",))]}, OK),
    (checks.interfaces, {"chosen": {"GLOO_SOCKET_IFNAME": "ib0"}}, PROBLEM),
    (checks.interfaces, {"chosen": {"NCCL_SOCKET_IFNAME": "=eth0"}}, OK),
    (checks.interfaces, {"chosen": {"NCCL_SOCKET_IFNAME": "^docker"}}, OK),
    (checks.own_name, {"resolved": ["127.0.1.1"]}, NOTE),
    (checks.own_name, {"resolved": ["127.0.1.1"], "known": [LO]}, OK),
    (checks.own_name, {"resolved": []}, NOTE),
    (checks.own_name, {"resolved": ["10.9.9.9"]}, WARNING),
    (checks.look_ups, {"reverse_s": 5.0}, WARNING),
    (checks.look_ups, {"own_s": 5.0}, WARNING),
    (checks.clock, {"synchronised": False}, NOTE),
    (checks.clock, {"read_ns": 900}, WARNING),
    (checks.key_file, {"user": 8}, PROBLEM),
    (checks.key_file, {"file": None}, OK),
    (checks.key_file, {"file": None, "named": True}, PROBLEM),
    (checks.key_file, {"file": key(0o640)}, PROBLEM),
    (checks.key_file, {"folder_mode": 0o777}, PROBLEM),
    (checks.key_file, {"folder_mode": 0o1777}, OK),
    (checks.versions, {"packages": {"dure": "1"}}, PROBLEM),
    (checks.versions, {"packages": {"torch": "2.4.1+cu1"}}, PROBLEM),
    (checks.versions, {"packages": {"torch": "2.14.0"}}, WARNING),
    (checks.checkout, {"commit": "1a2b3c4-dirty"}, NOTE),
    (checks.checkout, {"version": "0.2.0"}, OK),
    (checks.system, {"kernel": "4.18.0-el8"}, WARNING),
    (checks.system, {"name": "Darwin"}, WARNING),
    (checks.leftovers, {"left": [Orphan(9, "python", 60)]}, WARNING),
    (checks.environment, {"variables": {"WORLD_SIZE": "2"}}, WARNING),
    (checks.environment, {"variables": {"WORLD_SIZE": "2", "DURE_LAUNCHER": "j"}}, OK),
    (checks.environment, {"variables": {"OMP_NUM_THREADS": "9"}}, WARNING),
    (checks.environment, {"insecure": True}, WARNING),
    (checks.environment, {"unknown": "DURE_BACKED"}, WARNING),
    (checks.gpus, {"cards": [], "torch": {}}, OK),
    (checks.gpus, {"torch": TORCH | {"cuda": None, "gpus": []}}, WARNING),
    (checks.gpus, {"torch": TORCH | {"gpus": []}}, PROBLEM),
    (checks.gpus, {"cards": [CARD, CARD._replace(number="1")]}, WARNING),
    (checks.gpus, {"cards": [CARD, CARD._replace(number="1")], "hidden": True}, OK),
    (checks.gpus, {"torch": TORCH | {"apart": [[0, 1]]}}, WARNING),
    (checks.gpus, {"cards": [CARD._replace(used_mib=70_000)]}, WARNING),
    (checks.gpus, {"cards": [CARD._replace(mode="Exclusive_Process")]}, WARNING),
    (checks.gpus, {"error": "version mismatch", "torch": {}}, PROBLEM),
]
"""What changes of it come to."""


def worst(findings: Iterable[Finding]) -> Level:
    return max((f.level for f in findings), key=list(Level).index, default=OK)


@pytest.mark.parametrize(("judge", "changes", "level"), [*((c, {}, OK) for c in WELL), *CASES])
def test_check_judges_a_machine(
    judge: Callable[..., Iterable[Finding]], changes: dict[str, Any], level: Level
) -> None:
    findings = list(judge(**(WELL[judge] | changes)))
    assert worst(findings) is level
    assert all(bool(f.advice) is (f.level is not OK) for f in findings)


VERSIONS = {"dure": "1", "torch": "2", "pyzmq": "3"}


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (checks.same_versions(VERSIONS, VERSIONS, "b"), OK),
        (checks.same_versions(VERSIONS, VERSIONS | {"torch": "1"}, "b"), PROBLEM),
        (checks.same_versions(VERSIONS, {"dure": "1", "torch": "2"}, "b"), WARNING),
        (checks.clock_difference(-5.0, 0.001), WARNING),
        (checks.clock_difference(5.0, 4.5), OK),
        (checks.connection(False, "from here to it"), PROBLEM),
    ],
)
def test_other_host_is_judged(finding: Finding, level: Level) -> None:
    assert finding.level is level
