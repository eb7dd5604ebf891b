"""Where the launcher keeps the job's key for its ranks."""

from __future__ import annotations

import os
import stat

import pytest

from dure.launch import job


def forbidden(name: str, flags: int = 0) -> int:
    raise PermissionError(1, "a seccomp profile forbids it")


@pytest.mark.parametrize("memfd", [True, False], ids=["memory file", "forbidden"])
def test_key_lies_in_a_file_without_a_name(memfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not memfd:
        monkeypatch.setattr(os, "memfd_create", forbidden)
    with job._secret_memory("dure-key") as fd:
        os.write(fd, b"key")
        info = os.fstat(fd)
        assert os.pread(fd, 8, 0) == b"key"
        assert stat.S_IMODE(info.st_mode) == 0o600
        assert info.st_nlink == 0
        assert not os.get_inheritable(fd)
    with pytest.raises(OSError):
        os.fstat(fd)
