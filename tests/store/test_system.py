"""What the system grants: on made-up machines, and memory files on systems that forbid some."""

import errno
import math
import os
from pathlib import Path

import pytest

from dure.store.system import cpu_quota, memory_file
from tests.launch.ranks.kernel_files import write


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/", {}, math.inf),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        (
            "4:cpu,cpuacct:/x\n1:name=systemd:/",
            {
                "cpu/x/cpu.cfs_quota_us": "50000",
                "cpu/x/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
    ],
)
def test_quota_is_the_lowest_on_the_way(
    tmp_path: Path, group: str, files: dict[str, str], quota: float
) -> None:
    write(tmp_path, {"proc/self/cgroup": group})
    write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (False, errno.EACCES),  # vm.memfd_noexec=2 refuses files without the flag
        (True, errno.EINVAL),  # an older system does not know the flag
    ],
)
def test_a_memory_file_is_made_whatever_the_system_demands(
    monkeypatch: pytest.MonkeyPatch, refused: bool, error: int
) -> None:
    create = os.memfd_create
    no_exec_seal = 8

    def strict(name: str, flags: int) -> int:
        if bool(flags & no_exec_seal) == refused:
            raise OSError(error, os.strerror(error))
        return create(name, flags & ~no_exec_seal)

    monkeypatch.setattr(os, "memfd_create", strict)
    descriptor = memory_file("test")
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
