"""How much of the machine may be used: on made-up machines."""

import dataclasses
from pathlib import Path

import pytest

from dure.launch.ranks.limits import available_memory, memory_note
from dure.launch.spec import JobSpec
from tests.launch.ranks.kernel_files import write

MEMORY = {
    "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:  2000 kB",
    "proc/self/cgroup": "0::/a/b",
    "sys/fs/cgroup/a/memory.max": "1200000",
    "sys/fs/cgroup/a/memory.current": "1000000",
    "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 300000",
    "sys/fs/cgroup/a/b/memory.max": "max",
    "sys/fs/cgroup/a/b/memory.current": "1000000",
    "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "300000",
    "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "400000",
}


@pytest.mark.parametrize(
    ("changed", "available"),
    [
        ({}, 500_000),  # what group a leaves: 1.2 MB - 1.0 MB, and pages of files
        ({"sys/fs/cgroup/a/memory.max": "max"}, 2000 * 1024),
        ({"proc/self/cgroup": "7:memory:/x"}, 0),
        ({"proc/meminfo": "", "proc/self/cgroup": ""}, None),
    ],
)
def test_available_memory_is_what_the_tightest_limit_leaves(
    tmp_path: Path, changed: dict[str, str], available: int | None
) -> None:
    write(tmp_path, MEMORY | changed)
    assert available_memory(tmp_path) == available


@pytest.mark.parametrize(
    ("torch", "fits", "forked"), [(False, 80, False), (True, 16, True), (True, 4, False)]
)
def test_more_ranks_than_memory_holds_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, torch: bool, fits: int, forked: bool
) -> None:
    """Of 1 GB: 12 MB for each without torch, 60 MB forked, 250 MB for torch of its own."""
    monkeypatch.setattr("dure.launch.ranks.limits.available_memory", lambda: 1024 << 20)
    spec = JobSpec(program="train.py", nproc=fits)
    assert memory_note(spec, torch=torch, forked=forked) == ""
    spec = dataclasses.replace(spec, nproc=fits * 5 // 4)
    assert memory_note(spec, torch=torch, forked=forked).startswith(f"{spec.nproc} ranks may be")
    spec = dataclasses.replace(spec, oversubscribe=True)
    assert memory_note(spec, torch=torch, forked=forked) == ""
