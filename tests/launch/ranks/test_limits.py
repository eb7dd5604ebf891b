"""How much of the machine may be used: on made-up machines."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dure.errors import UsageError
from dure.launch.ranks.limits import available_memory, check_memory
from dure.launch.ranks.zygote import zygote_for
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
    ("text", "fits", "zygote"),
    [("", 80, "auto"), ("import torch", 16, "auto"), ("import torch", 4, "never")],
)
def test_more_ranks_than_memory_holds_start_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fits: int, zygote: str
) -> None:
    """Of 1 GB: 12 MB for each without torch, 60 MB forked, 250 MB for torch of its own."""
    (tmp_path / "train.py").write_text(text)
    monkeypatch.setattr("dure.launch.ranks.limits.available_memory", lambda: 1024 << 20)
    monkeypatch.setattr("subprocess.Popen", None)  # as nothing is started
    torch, forked = bool(text), zygote == "auto"
    spec = JobSpec(program=str(tmp_path / "train.py"), nproc=fits, zygote=zygote)  # pyright: ignore
    check_memory(spec, torch=torch, forked=forked)
    spec = dataclasses.replace(spec, nproc=fits * 5 // 4)
    with pytest.raises(UsageError, match=f"{spec.nproc} ranks.*--oversubscribe"):
        zygote_for(spec, "a-job", None).__enter__()
    spec = dataclasses.replace(spec, oversubscribe=True)
    check_memory(spec, torch=torch, forked=forked)
