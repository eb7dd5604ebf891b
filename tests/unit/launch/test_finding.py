"""Who coordinates at the endpoint, and who does not take whom for the job's coordinator."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from dure.errors import LaunchError, StoreError
from dure.launch import JobSpec, run_job
from dure.launch.agent import link as links
from dure.launch.agent.events import Left
from dure.launch.agent.link import EndpointLink
from dure.launch.agent.machine import Phase
from dure.launch.agent.membership import open_shared
from dure.launch.ranks.ports import reserve_port
from dure.store.key import JobKey, control_key, mint
from dure.store.network import NetworkStore
from waiting import until


@contextlib.contextmanager
def linked(spec: JobSpec, key: JobKey) -> Iterator[EndpointLink]:
    link = EndpointLink(spec, key)
    try:
        yield link
    finally:
        link.close()


def job(port: int, join_timeout_s: float = 10.0) -> JobSpec:
    return JobSpec(
        program="prog.py",
        nnodes=(2, 2),
        endpoint=f"127.0.0.1:{port}",
        join_timeout_s=join_timeout_s,
    )


def test_a_job_that_has_ended_is_not_the_next_one() -> None:
    key = mint()
    kept, port = reserve_port()
    with kept:
        spec = job(port)
        last = EndpointLink(spec, key)
        following = EndpointLink(replace(spec, node_rank=1), key)
        member = last.join("a")
        member.tell(Left(member.agent, 143))
        until(lambda: member.machine().phase is Phase.OVER)
        ending = threading.Timer(0.3, last.close)
        ending.start()
        member = following.join("b")  # whatever its node rank, for the endpoint is here
        ending.join()
        assert following.coordinates
        assert member.machine().agents == (member.agent,)
        following.close()


def test_ranks_have_a_key_that_does_not_open_the_control_server() -> None:
    key = mint()
    kept, port = reserve_port()
    with kept:
        spec = job(port)
        with linked(spec, key) as first, linked(spec, key) as second:
            one, two = first.join("a"), second.join("b")
            assert (first.coordinates, second.coordinates) == (True, False)
            terms = one.machine().settings
            assert terms == two.machine().settings
            assert terms.store != spec.endpoint
            assert terms.job_key not in (key.raw, control_key(key, str(spec.endpoint), "").raw)
            ranks = open_shared(f"tcp://{terms.store}", terms.job_key, 0.5)
            with contextlib.closing(cast(NetworkStore, ranks)):
                assert ranks.look("", -1, 0.0)[1] == {}
            with pytest.raises(StoreError, match="refused"):
                open_shared(f"tcp://{spec.endpoint}", terms.job_key, 0.5)


def test_a_program_that_does_not_answer_holds_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_TAKEN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            linked(job(port, join_timeout_s=60), mint()) as link,
            pytest.raises(LaunchError, match=f"port {port} of this host is taken"),
        ):
            link.join("a")


def test_who_does_not_coordinate_and_finds_nobody_says_so() -> None:
    kept, port = reserve_port()
    with kept:
        spec = replace(job(port, join_timeout_s=0.3), serves=False)
        with (
            linked(spec, mint()) as link,
            pytest.raises(LaunchError, match="cannot be found") as caught,
        ):
            link.join("a")
    assert caught.value.elapsed_s is not None


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
    for there in (file, file / "below", tmp_path / ("x" * 300)):
        with pytest.raises(LaunchError, match="could not be started") as caught:
            run_job(replace(JobSpec(program=__file__), **{flag: there}))
        assert str(there) in caught.value.seen
