"""Each check of `dure doctor` on made-up machines."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dure.cli.doctor import (
    cgroup,
    clock,
    collectives,
    cores,
    gpus,
    hosts,
    keys,
    leftovers,
    limits,
    memory,
    names,
    ports,
    settings,
    sharing,
    versions,
)
from dure.cli.doctor.collectives import Attempt
from dure.cli.doctor.command import run_checks
from dure.cli.doctor.finding import Finding, Level, fine, size
from dure.cli.doctor.names import Interface

GIB = 1 << 30
OK, NOTE, WARNING, PROBLEM = Level.OK, Level.NOTE, Level.WARNING, Level.PROBLEM

CORES = cores.Cores(total=8, usable=8, quota=None, load=0.3)
MEMORY = memory.Memory(total=64 * GIB, available=50 * GIB, huge_pages="madvise")
SHARING = sharing.Sharing(shm_total=32 * GIB, shm_free=30 * GIB)
LIMITS = limits.Limits(locked=None, files=65536, processes=None)
PORTS = ports.Ports(first=32768, last=60999)
LO = Interface(name="lo", addresses=("127.0.0.1",))
ETH = Interface(name="eth0", addresses=("10.0.0.2",), mbits=100_000)
IB = Interface(name="ib0", addresses=("10.1.0.2",))
NAMES = names.Names(hostname="a", interfaces=(LO, ETH), resolved=("10.0.0.2",))
CLOCK = clock.Clock(synchronised=True, source="tsc", read_ns=40)
KEY = keys.KeyFile(path="/home/me/.config/dure/key", exists=True, mode=0o600, owner=7)
KEYS = keys.Keys(files=(KEY,), user=7)
PACKAGES: dict[str, str] = dict.fromkeys(("dure", "torch", "pyzmq", "msgspec", "psutil"), "30.0")
VERSIONS = versions.Versions(python=(3, 11, 7), packages=PACKAGES)
MEMBER = leftovers.Member(pid=9, job="j", command="python", age_s=60)
CARD = gpus.Gpu(index=0, name="H", driver="550", total_mib=80_000, used_mib=10)
GPUS = gpus.Gpus(installed=True, cards=(CARD,))
TORCH: dict[str, Any] = {"torch": "2.13.0", "cuda": "12.8", "gpus": ["H"], "apart": []}


def worst(findings: list[Finding]) -> Level:
    return max((f.level for f in findings), key=list(Level).index)


def changed(value: Any, **changes: object) -> Any:
    return dataclasses.replace(value, **changes)


@pytest.mark.parametrize(
    ("judge", "machine", "level"),
    [
        (cores.judge, CORES, OK),
        (cores.judge, changed(CORES, usable=2), WARNING),
        (cores.judge, changed(CORES, quota=1.5), WARNING),
        (cores.judge, changed(CORES, quota=8.0), OK),
        (cores.judge, changed(CORES, load=6.0), WARNING),
        (cores.judge, changed(CORES, quota=2.0, load=1.5), WARNING),
        (cores.judge, changed(CORES, governor="powersave"), WARNING),
        (memory.judge, MEMORY, OK),
        (memory.judge, changed(MEMORY, available=100 << 20), PROBLEM),
        (memory.judge, changed(MEMORY, available=GIB), WARNING),
        (memory.judge, changed(MEMORY, limit=GIB, used_of_limit=GIB - 1000), PROBLEM),
        (memory.judge, changed(MEMORY, limit=128 * GIB), OK),
        (memory.judge, changed(MEMORY, swap_used=20 * GIB), WARNING),
        (memory.judge, changed(MEMORY, huge_pages="never"), WARNING),
        (sharing.judge, SHARING, OK),
        (sharing.judge, changed(SHARING, shm_total=None), WARNING),
        (sharing.judge, changed(SHARING, shm_free=64 << 20), WARNING),
        (sharing.judge, changed(SHARING, shm_writable=False), WARNING),
        (sharing.judge, changed(SHARING, memfd_error="not permitted"), PROBLEM),
        (sharing.judge, changed(SHARING, peer_error="Permission denied"), PROBLEM),
        (sharing.judge, changed(SHARING, pidfd_error="not implemented"), PROBLEM),
        (sharing.judge, changed(SHARING, ptrace_scope=1, container="docker"), OK),
        (sharing.judge, changed(SHARING, ptrace_scope=3), WARNING),
        (limits.judge, LIMITS, OK),
        (limits.judge, changed(LIMITS, locked=64 << 10), OK),
        (limits.judge, changed(LIMITS, locked=64 << 10, fabric=True), PROBLEM),
        (limits.judge, changed(LIMITS, files=512), WARNING),
        (limits.judge, changed(LIMITS, files=64), PROBLEM),
        (limits.judge, changed(LIMITS, pids=100, num_pids=80), PROBLEM),
        (limits.judge, changed(LIMITS, processes=512), WARNING),
        (limits.judge, changed(LIMITS, temporary_free=1 << 20), PROBLEM),
        (ports.judge, PORTS, OK),
        (ports.judge, changed(PORTS, num_used=28_000), WARNING),
        (ports.judge, changed(PORTS, usual_taken=True), WARNING),
        (ports.judge, changed(PORTS, loopback_error="refused"), PROBLEM),
        (names.judge, NAMES, OK),
        (names.judge, changed(NAMES, interfaces=()), PROBLEM),
        (names.judge, changed(NAMES, interfaces=(LO,), resolved=("127.0.0.1",)), NOTE),
        (names.judge, changed(NAMES, interfaces=(LO, ETH, IB)), NOTE),
        (names.judge, changed(NAMES, resolved=("127.0.1.1",)), NOTE),
        (names.judge, changed(NAMES, resolved=()), NOTE),
        (names.judge, changed(NAMES, resolved=("10.9.9.9",)), WARNING),
        (names.judge, changed(NAMES, reverse_s=5.0), WARNING),
        (names.judge, changed(NAMES, resolve_s=5.0), WARNING),
        (names.judge, changed(NAMES, chosen=(("GLOO_SOCKET_IFNAME", "ib0"),)), PROBLEM),
        (names.judge, changed(NAMES, chosen=(("NCCL_SOCKET_IFNAME", "=eth0"),)), OK),
        (names.judge, changed(NAMES, chosen=(("NCCL_SOCKET_IFNAME", "^docker"),)), OK),
        (clock.judge, CLOCK, OK),
        (clock.judge, changed(CLOCK, synchronised=False), NOTE),
        (clock.judge, changed(CLOCK, synchronised=None), OK),
        (clock.judge, changed(CLOCK, source="hpet", read_ns=1500), WARNING),
        (keys.judge, KEYS, OK),
        (keys.judge, changed(KEYS, insecure=True), WARNING),
        (keys.judge, changed(KEYS, user=8), PROBLEM),
        (keys.judge, changed(KEYS, files=(changed(KEY, exists=False),)), OK),
        (keys.judge, changed(KEYS, files=(changed(KEY, exists=False, named=True),)), PROBLEM),
        (keys.judge, changed(KEYS, files=(changed(KEY, mode=0o640),)), PROBLEM),
        (keys.judge, changed(KEYS, files=(changed(KEY, folder_mode=0o777),)), PROBLEM),
        (keys.judge, changed(KEYS, files=(changed(KEY, folder_mode=0o1777),)), OK),
        (versions.judge, VERSIONS, OK),
        (versions.judge, changed(VERSIONS, python=(3, 10)), PROBLEM),
        (versions.judge, changed(VERSIONS, packages={"dure": "1"}), PROBLEM),
        (versions.judge, changed(VERSIONS, packages=PACKAGES | {"torch": "2.4.1+cu1"}), PROBLEM),
        (versions.judge, changed(VERSIONS, packages=PACKAGES | {"torch": "2.13.0a0"}), OK),
        (versions.judge, changed(VERSIONS, kernel="4.18.0-el8"), WARNING),
        (versions.judge, changed(VERSIONS, system="Darwin"), WARNING),
        (leftovers.judge, [], OK),
        (leftovers.judge, [MEMBER, changed(MEMBER, parent_in_job=True)], OK),
        (leftovers.judge, [changed(MEMBER, parent_is_init=True)], WARNING),
        (settings.judge, settings.Settings(variables={}, usable=4), OK),
        (settings.judge, settings.Settings(variables={"WORLD_SIZE": "2"}, usable=4), WARNING),
        (settings.judge, settings.Settings(variables={"OMP_NUM_THREADS": "9"}, usable=4), WARNING),
    ],
)
def test_check_judges_a_machine(
    judge: Callable[[Any], list[Finding]], machine: object, level: Level
) -> None:
    findings = judge(machine)
    assert worst(findings) is level
    assert all(bool(f.advice) is (f.level is not OK) for f in findings)


@pytest.mark.parametrize(
    ("cards", "torch", "level"),
    [
        (gpus.Gpus(installed=False), {}, OK),
        (GPUS, TORCH, OK),
        (GPUS, TORCH | {"cuda": None, "gpus": []}, WARNING),
        (GPUS, TORCH | {"gpus": []}, PROBLEM),
        (changed(GPUS, cards=(CARD, changed(CARD, index=1))), TORCH, WARNING),
        (GPUS, TORCH | {"apart": [[0, 1]]}, WARNING),
        (changed(GPUS, cards=(changed(CARD, used_mib=70_000),)), TORCH, WARNING),
        (changed(GPUS, cards=(changed(CARD, mode="Exclusive_Process"),)), TORCH, WARNING),
        (changed(GPUS, error="version mismatch"), {}, PROBLEM),
    ],
)
def test_gpus_are_compared_with_what_torch_sees(
    cards: gpus.Gpus, torch: dict[str, Any], level: Level
) -> None:
    assert worst(gpus.judge(cards, torch)) is level


def told(*lines: dict[str, Any], **changes: Any) -> Attempt:
    return Attempt(backends=("shm", "gloo"), told=list(lines), **changes)


WORKS = [{"backend": b, "ranks": 2, "us": 3.0} for b in ("shm", "gloo")]


@pytest.mark.parametrize(
    ("attempt", "levels"),
    [
        (told(*WORKS), [OK, OK]),
        (told({"backend": "shm", "absent": True}, WORKS[1]), [PROBLEM, OK]),
        (told({"backend": "shm", "error": "CommTimeout: x"}, WORKS[1]), [PROBLEM, OK]),
        (told(WORKS[0], timed_out=True), [OK, WARNING]),
        (told(code=1, words="no memory"), [PROBLEM]),
        (None, [OK]),
    ],
)
def test_collectives_say_which_backend_fails(attempt: Attempt | None, levels: list[Level]) -> None:
    assert [finding.level for finding in collectives.judge(attempt)] == levels


MINE = {"dure": "1", "torch": "2", "pyzmq": "3"}
ANSWER = hosts.Answer(
    host="b", address="10.0.0.3", packages=MINE, uncertain_s=0.001, reached=True, reached_back=True
)


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, OK),
        ({"error": "Permission denied (publickey)"}, PROBLEM),
        ({"packages": MINE | {"torch": "1"}}, PROBLEM),
        ({"packages": {"dure": "1", "torch": "2"}}, WARNING),
        ({"ahead_s": -5.0}, WARNING),
        ({"ahead_s": 5.0, "uncertain_s": 4.5}, OK),
        ({"reached": False}, PROBLEM),
        ({"reached_back": False}, PROBLEM),
        ({"address": "", "reached": None, "reached_back": None}, WARNING),
    ],
)
def test_other_host_is_judged(changes: dict[str, Any], level: Level) -> None:
    assert worst(hosts.judge(changed(ANSWER, **changes), MINE)) is level


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
    assert [(f.check, f.level) for f in found] == [
        ("fails", WARNING),
        ("hangs", WARNING),
        ("works", OK),
    ]


def test_smallest_limit_of_the_enclosing_groups_holds(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "_groups", lambda root, own: [tmp_path / "a", tmp_path])  # pyright: ignore
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "a" / "memory.max").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup.cpu_quota() == 1.5
    assert cgroup.memory_limit() == 1000
    assert cgroup.pids_limit() is None


def test_sizes_are_readable_and_findings_can_be_json() -> None:
    assert size(64 << 20) == "64 MiB"
    assert size(3 << 41) == "6 TiB"
    assert json.dumps(dataclasses.asdict(fine("a", "b")), default=str)
