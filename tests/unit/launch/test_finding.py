"""Who serves the endpoint's store, and who does not take whom for the job's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dure.errors import LaunchError, StoreError, UsageError
from dure.launch import JobSpec, run_job
from dure.launch.agent import finding
from dure.launch.agent.finding import OVER, meet
from dure.store.address import resolve
from dure.store.key import JobKey, mint
from dure.store.ladder import Ladder
from dure.store.listener import listen
from dure.store.server import StoreServer


@contextmanager
def ended_job(key: JobKey) -> Iterator[StoreServer]:
    """The store of a job that is over."""
    server = StoreServer(listen(resolve("127.0.0.1", 0)), key)
    address = f"127.0.0.1:{server.port}"
    ladder = Ladder([address], key, own=address)
    ladder.lead().set(OVER, b"")
    ladder.close()
    try:
        yield server
    finally:
        server.stop()


def job(port: int, join_timeout_s: float = 10.0) -> JobSpec:
    return JobSpec(
        program="prog.py",
        nnodes=(2, 2),
        endpoint=f"127.0.0.1:{port}",
        join_timeout_s=join_timeout_s,
    )


def test_the_store_of_a_job_that_has_ended_is_not_the_next_jobs() -> None:
    key = mint()
    with ended_job(key) as last:
        ending = threading.Timer(0.2, last.stop)
        ending.start()
        server, ladder = meet(job(last.port), key, -1)
        ending.join()
    assert ladder.leading
    assert server.port == last.port
    ladder.close()
    server.stop()


def test_the_endpoints_port_is_another_programs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match="another program"):
            meet(job(port, join_timeout_s=0.3), mint(), -1)


def test_a_program_that_does_not_answer_holds_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "_FOREIGN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} of this host is taken"):
            meet(job(port, join_timeout_s=60), mint(), -1)


def test_who_does_not_serve_and_finds_nobody_says_so() -> None:
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        spec = job(kept.getsockname()[1], join_timeout_s=0.3)
        with pytest.raises(LaunchError, match="cannot be found") as caught:
            meet(replace(spec, serves=False), mint(), -1)
    assert caught.value.elapsed_s is not None


def test_a_wildcard_for_stores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURE_STORE_BIND", "0.0.0.0")
    with pytest.raises(StoreError, match="wildcard"):
        meet(job(1), mint(), -1)


def test_an_endpoint_that_is_refused_keeps_its_own_advice() -> None:
    spec = JobSpec(program=__file__, nnodes=(1, 2), endpoint="0:29400")
    with pytest.raises(LaunchError) as caught:
        run_job(spec)
    assert isinstance(caught.value.__cause__, StoreError)
    assert not caught.value.fix


def test_log_directory_that_is_a_file_is_a_users_mistake(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for directory in (file, file / "below"):
        with pytest.raises(UsageError, match=r"--log-dir .* is not a directory"):
            run_job(JobSpec(program=__file__, log_dir=directory))
        with pytest.raises(UsageError, match=r"--trace-dir .* is not a directory"):
            run_job(JobSpec(program=__file__, trace_dir=directory))


def test_directory_that_cannot_be_looked_up_is_a_users_mistake(tmp_path: Path) -> None:
    there = tmp_path / ("x" * 300)  # a name that no file system takes, whoever asks
    with pytest.raises(UsageError, match=r"--log-dir .* cannot be reached") as caught:
        run_job(JobSpec(program=__file__, log_dir=there))
    assert isinstance(caught.value.__cause__, OSError)
