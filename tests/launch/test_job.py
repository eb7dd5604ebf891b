"""A job that cannot be started, and where its key is."""

import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dure.errors import LaunchError, StoreError
from dure.launch import JobSpec, launcher, run_job


def test_key_lies_in_a_file_without_a_name() -> None:
    with launcher._secret_memory("dure-key") as fd:
        info = os.fstat(fd)
        assert (stat.S_IMODE(info.st_mode), info.st_nlink) == (0o600, 0)
        assert not os.get_inheritable(fd)
    with pytest.raises(OSError):
        os.fstat(fd)


def test_an_endpoint_that_is_refused_keeps_its_own_advice() -> None:
    spec = JobSpec(program=__file__, nnodes=(1, 2), endpoint="0:29400")
    with pytest.raises(LaunchError) as caught:
        run_job(spec)
    assert isinstance(caught.value.__cause__, StoreError)
    assert not caught.value.fix


@pytest.mark.parametrize("flag", ["log_dir", "trace_dir"])
def test_a_directory_that_cannot_be_made_is_named(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for there in (file / "below", tmp_path / ("x" * 300)):
        with pytest.raises(LaunchError, match="could not be started") as caught:
            run_job(replace(JobSpec(program=__file__), **{flag: there}))
        assert str(there) in caught.value.seen


def test_a_port_for_probes_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} cannot be used") as caught:
            run_job(JobSpec(program=__file__, health_port=port))
    assert "--health-port" in caught.value.fix
    with pytest.raises(LaunchError, match="port 70000 cannot be used"):
        run_job(JobSpec(program=__file__, health_port=70_000))
