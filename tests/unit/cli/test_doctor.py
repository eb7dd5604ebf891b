"""Each check of `dure doctor` on made-up machines."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from dure.cli.doctor import checks, collectives
from dure.cli.doctor.checks import Finding, Gpu, Interface, Level, Orphan, fine
from dure.cli.doctor.collectives import Attempt
from dure.cli.doctor.command import run_checks

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


# Of each check: a machine with nothing wrong, and what changes of it come to.
CASES: list[tuple[Callable[..., Iterable[Finding]], dict[str, Any], list[Any]]] = [
    (
        checks.cores,
        {"total": 8, "usable": 8, "quota": math.inf, "load": 0.3, "governor": ""},
        [
            ({"usable": 2}, WARNING),
            ({"quota": 1.5}, WARNING),
            ({"quota": 8.0}, OK),
            ({"load": 6.0}, WARNING),
            ({"quota": 2.0, "load": 1.5}, WARNING),
            ({"governor": "powersave"}, WARNING),
        ],
    ),
    (
        checks.memory,
        {"total": 64 * GIB, "free": 50 * GIB, "swapped": 0, "left": None},
        [
            ({"free": 100 << 20}, PROBLEM),
            ({"free": GIB}, WARNING),
            ({"left": 1000}, PROBLEM),
            ({"left": 40 * GIB}, OK),
            ({"swapped": 20 * GIB}, WARNING),
        ],
    ),
    (checks.huge_pages, {"private": "madvise", "shared": ""}, [({"private": "never"}, WARNING)]),
    (
        checks.shm,
        {"total": 32 * GIB, "free": 30 * GIB, "writable": True},
        [({"free": 64 << 20}, WARNING), ({"writable": False}, WARNING)],
    ),
    (
        checks.engine,
        {"memfd_error": "", "peer_error": "", "pidfd_error": ""},
        [({name: "no"}, PROBLEM) for name in ("memfd_error", "peer_error", "pidfd_error")],
    ),
    (
        checks.ptrace,
        {"scope": 0, "container": "", "seccomp": False},
        [({"scope": 1, "container": "docker"}, OK), ({"scope": 3}, WARNING)],
    ),
    (
        checks.locked_memory,
        {"limit": math.inf, "fabric": False},
        [({"limit": 64 << 10}, OK), ({"limit": 64 << 10, "fabric": True}, PROBLEM)],
    ),
    (checks.files, {"limit": 65536}, [({"limit": 512}, WARNING), ({"limit": 64}, PROBLEM)]),
    (
        checks.processes,
        {"limit": math.inf, "running": 80},
        [({"limit": 100}, PROBLEM), ({"limit": 512}, WARNING)],
    ),
    (checks.temporary_files, {"free": GIB, "folder": "/tmp"}, [({"free": 1 << 20}, PROBLEM)]),
    (
        checks.ports,
        {"first": 32768, "last": 60999, "used": 0, "usual_by": "", "loopback_error": ""},
        [
            ({"used": 28_000}, WARNING),
            ({"usual_by": "somebody"}, WARNING),
            ({"loopback_error": "refused"}, PROBLEM),
        ],
    ),
    (
        checks.interfaces,
        {"known": [LO, ETH], "default": "eth0", "chosen": {}},
        [
            ({"known": []}, PROBLEM),
            ({"known": [LO]}, NOTE),
            ({"known": [LO, ETH, IB]}, NOTE),
            ({"known": [LO, ETH, Interface("docker0", ("172.17.0.1",))]}, OK),
            ({"chosen": {"GLOO_SOCKET_IFNAME": "ib0"}}, PROBLEM),
            ({"chosen": {"NCCL_SOCKET_IFNAME": "=eth0"}}, OK),
            ({"chosen": {"NCCL_SOCKET_IFNAME": "^docker"}}, OK),
        ],
    ),
    (
        checks.own_name,
        {"hostname": "a", "resolved": ["10.0.0.2"], "known": [LO, ETH]},
        [
            ({"resolved": ["127.0.1.1"]}, NOTE),
            ({"resolved": ["127.0.1.1"], "known": [LO]}, OK),
            ({"resolved": []}, NOTE),
            ({"resolved": ["10.9.9.9"]}, WARNING),
        ],
    ),
    (
        checks.look_ups,
        {"own_s": 0.001, "reverse_s": 0.001},
        [({"reverse_s": 5.0}, WARNING), ({"own_s": 5.0}, WARNING)],
    ),
    (
        checks.clock,
        {"synchronised": True, "source": "tsc", "read_ns": 40},
        [
            ({"synchronised": False}, NOTE),
            ({"read_ns": 900}, WARNING),
        ],
    ),
    (
        checks.key_file,
        {"path": KEY, "file": key(0o600), "folder_mode": 0o700, "user": 7, "named": False},
        [
            ({"user": 8}, PROBLEM),
            ({"file": None}, OK),
            ({"file": None, "named": True}, PROBLEM),
            ({"file": key(0o640)}, PROBLEM),
            ({"folder_mode": 0o777}, PROBLEM),
            ({"folder_mode": 0o1777}, OK),
        ],
    ),
    (
        checks.versions,
        {"python": "3.11.7", "packages": {"torch": "2.13.0a0"}},
        [
            ({"packages": {"dure": "1"}}, PROBLEM),
            ({"packages": {"torch": "2.4.1+cu1"}}, PROBLEM),
        ],
    ),
    (
        checks.system,
        {"name": "Linux", "kernel": "6.1.0", "machine": "x86_64"},
        [({"kernel": "4.18.0-el8"}, WARNING), ({"name": "Darwin"}, WARNING)],
    ),
    (
        checks.leftovers,
        {"jobs": 1, "left": []},
        [({"left": [Orphan(9, "python", 60)]}, WARNING)],
    ),
    (
        checks.environment,
        {"variables": {}, "usable": 4, "insecure": False},
        [
            ({"variables": {"WORLD_SIZE": "2"}}, WARNING),
            ({"variables": {"WORLD_SIZE": "2", "DURE_LAUNCHER": "j"}}, OK),
            ({"variables": {"OMP_NUM_THREADS": "9"}}, WARNING),
            ({"insecure": True}, WARNING),
        ],
    ),
    (
        checks.gpus,
        {"cards": [CARD], "error": "", "torch": TORCH, "hidden": False},
        [
            ({"cards": [], "torch": {}}, OK),
            ({"torch": TORCH | {"cuda": None, "gpus": []}}, WARNING),
            ({"torch": TORCH | {"gpus": []}}, PROBLEM),
            ({"cards": [CARD, CARD._replace(number="1")]}, WARNING),
            ({"cards": [CARD, CARD._replace(number="1")], "hidden": True}, OK),
            ({"torch": TORCH | {"apart": [[0, 1]]}}, WARNING),
            ({"cards": [CARD._replace(used_mib=70_000)]}, WARNING),
            ({"cards": [CARD._replace(mode="Exclusive_Process")]}, WARNING),
            ({"error": "version mismatch", "torch": {}}, PROBLEM),
        ],
    ),
]


def worst(findings: Iterable[Finding]) -> Level:
    return max((f.level for f in findings), key=list(Level).index)


@pytest.mark.parametrize(
    ("judge", "well", "cases"), CASES, ids=lambda x: getattr(x, "__name__", "")
)
def test_check_judges_a_machine(
    judge: Callable[..., Iterable[Finding]], well: dict[str, Any], cases: list[Any]
) -> None:
    for changes, level in [({}, OK), *cases]:
        findings = list(judge(**(well | changes)))
        assert worst(findings) is level, changes
        assert all(bool(f.advice) is (f.level is not OK) for f in findings)


WORKS = [{"backend": b, "ranks": 2, "us": 3.0} for b in ("shm", "gloo")]


@pytest.mark.parametrize(
    ("told", "others", "levels"),
    [
        (WORKS, {}, [OK, OK]),
        ([{"backend": "shm", "absent": True}, WORKS[1]], {}, [PROBLEM, OK]),
        ([{"backend": "shm", "error": "CommTimeout: x"}, WORKS[1]], {}, [PROBLEM, OK]),
        (WORKS[:1], {"timed_out": True}, [OK, WARNING]),
        ([], {"code": 1, "words": "no memory"}, [PROBLEM]),
    ],
)
def test_collectives_say_which_backend_fails(
    told: list[dict[str, Any]], others: dict[str, Any], levels: list[Level]
) -> None:
    attempt = Attempt(backends=("shm", "gloo"), told=told, **others)
    assert [finding.level for finding in collectives.judge(attempt)] == levels


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


def test_check_that_fails_or_hangs_ends_no_other() -> None:
    hang = threading.Event()

    def fails() -> list[Finding]:
        raise PermissionError("/proc/x")

    def hangs() -> list[Finding]:
        hang.wait(30)
        return []

    found = run_checks(
        {"fails": fails, "hangs": hangs, "works": lambda: [fine("works", "yes")]}, limit_s=0.2
    )
    hang.set()
    seen = [(f.check, f.level) for f in found]
    assert seen == [("fails", WARNING), ("hangs", WARNING), ("works", OK)]
