"""Who coordinates at the endpoint, and who does not take whom for the job's coordinator."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from dure.errors import LaunchError, StoreRefused
from dure.launch import JobSpec
from dure.launch.agent import link as links
from dure.launch.agent.events import Left
from dure.launch.agent.link import EndpointLink
from dure.launch.agent.machine import Phase
from dure.launch.agent.membership import open_shared
from dure.store.key import JobKey, control_key, mint
from dure.store.network import NetworkStore
from tests.waiting import PATIENCE_S, until


@contextlib.contextmanager
def linked(spec: JobSpec, key: JobKey) -> Iterator[EndpointLink]:
    link = EndpointLink(spec, key)
    try:
        yield link
    finally:
        link.close()


def job(port: int, join_timeout_s: float = PATIENCE_S) -> JobSpec:
    return JobSpec(
        program="prog.py",
        nnodes=(2, 2),
        endpoint=f"127.0.0.1:{port}",
        join_timeout_s=join_timeout_s,
    )


def test_a_job_that_has_ended_is_not_the_next_one(port: int) -> None:
    key, spec = mint(), job(port)
    last = EndpointLink(spec, key)
    ending = [last.close]

    class Following(EndpointLink):
        """Looks for its job once, then lets the last one's coordinator go."""

        def _pause(self, seconds: float) -> None:
            while ending:
                ending.pop()()
            super()._pause(seconds)

    member = last.join("a")
    member.tell(Left(member.agent, 143))
    until(lambda: member.machine().phase is Phase.OVER)
    following = Following(replace(spec, node_rank=1), key)
    member = following.join("b")  # whatever its node rank, for the endpoint is here
    assert (ending, following.coordinates) == ([], True)
    assert member.machine().agents == (member.agent,)
    following.close()


def test_ranks_have_a_key_that_does_not_open_the_control_server(port: int) -> None:
    key, spec = mint(), job(port)
    with linked(spec, key) as first, linked(spec, key) as second:
        one, two = first.join("a"), second.join("b")
        assert (first.coordinates, second.coordinates) == (True, False)
        terms = one.machine().settings
        assert terms == two.machine().settings
        assert terms.store != spec.endpoint
        assert terms.job_key not in (key.raw, control_key(key, str(spec.endpoint), "").raw)
        ranks = open_shared(f"tcp://{terms.store}", terms.job_key, PATIENCE_S)
        with contextlib.closing(cast(NetworkStore, ranks)):
            assert ranks.look("", -1, 0.0)[1] == {}
        with pytest.raises(StoreRefused):
            open_shared(f"tcp://{spec.endpoint}", terms.job_key, PATIENCE_S)


def test_a_program_that_does_not_answer_holds_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_TAKEN_S", 0.0)
    monkeypatch.setenv("DURE_SILENCE", "2")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with linked(job(port), mint()) as link, pytest.raises(LaunchError, match=f"port {port}"):
            link.join("a")


def test_who_does_not_coordinate_and_finds_nobody_says_so(port: int) -> None:
    spec = replace(job(port, join_timeout_s=0.3), serves=False)
    with linked(spec, mint()) as link, pytest.raises(LaunchError, match="cannot be found"):
        link.join("a")


@pytest.mark.parametrize(("silence", "lease_s"), [("", 30), ("45", 45)])
def test_a_lease_lasts_as_long_as_a_host_may_be_silent(
    port: int, monkeypatch: pytest.MonkeyPatch, silence: str, lease_s: int
) -> None:
    monkeypatch.setenv("DURE_SILENCE", silence)
    with linked(job(port), mint()) as link:
        assert link.join("a").machine().settings.lease_s == lease_s


def test_loopback_interface_that_is_down_is_not_waited_for(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "why_unreachable", lambda endpoint: f"{endpoint} is down")
    with linked(job(port), mint()) as link, pytest.raises(LaunchError) as caught:
        link.join("a")
    assert f"tcp://127.0.0.1:{port} is down" in caught.value.seen
