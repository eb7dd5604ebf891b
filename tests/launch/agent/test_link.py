"""Who coordinates at the endpoint, and who does not take whom for the job's coordinator."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dure.errors import LaunchError, StoreRefused, StoreTimeout, UsageError
from dure.launch import JobSpec
from dure.launch.agent import link as links
from dure.launch.agent.control import CoordinatorClient, open_control
from dure.launch.agent.events import Idle, Leave, Left, RunRound
from dure.launch.agent.link import HostEndpoint, Link, settings_of
from dure.launch.agent.messages import Answer, Control, Message
from dure.launch.signals import Interrupted, caught_signals, pause
from dure.store import network
from dure.store.builds import Build, own_build
from dure.store.key import JobKey, control_key, mint
from dure.store.network import NetworkStore
from tests.waiting import PATIENCE_S, until


@contextlib.contextmanager
def linked(
    spec: JobSpec, key: JobKey, say: Callable[[str], None] = lambda line: None
) -> Iterator[Link]:
    """Return a link of a launcher that has no reaper, and gets no signals."""
    reaper: Any = SimpleNamespace(extend=lambda deadline: None, appoint=lambda will: None)
    signals, ours = os.pipe2(os.O_NONBLOCK)
    link = Link(
        spec, HostEndpoint(spec, key, signals=signals, say=say), reaper, signals=signals, say=say
    )
    try:
        yield link
    finally:
        link.close()
        os.close(signals)
        os.close(ours)


def job(port: int, join_timeout_s: float = PATIENCE_S) -> JobSpec:
    return JobSpec(
        program="prog.py",
        nnodes=(2, 2),
        endpoint=f"127.0.0.1:{port}",
        join_timeout_s=join_timeout_s,
    )


def test_a_job_that_has_ended_is_not_the_next_one(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, spec = mint(), job(port)
    with contextlib.ExitStack() as last:
        member = last.enter_context(linked(spec, key)).join("a")
        member.report(Left(member.agent, 143, ends_job=True))
        until(lambda: isinstance(member.action(), Leave))
        # The next one has looked for its job once, and found the last one.
        monkeypatch.setattr(links, "pause", lambda *_: last.close())
        with linked(replace(spec, node_rank=1), key) as following:  # for the endpoint is here
            member = following.join("b")
            assert following.endpoint.coordinates
            assert isinstance(member.action(), Idle)


def test_a_host_whose_answer_was_lost_is_counted_once(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, spec, ask, lost = mint(), job(port), CoordinatorClient.ask, list[Message]()

    def asked(self: CoordinatorClient, message: Message, timeout_s: float = 0.0) -> Answer:
        answer = ask(self, message, timeout_s)
        if not lost:
            lost.append(message)
            raise StoreTimeout("the answer was lost", op="control", keys=())
        return answer

    with linked(spec, key) as first, linked(spec, key) as second:
        one = first.join("a")
        monkeypatch.setattr(CoordinatorClient, "ask", asked)
        two = second.join("b")
        for member in (one, two):
            until(lambda member=member: isinstance(member.action(), RunRound))


def test_a_coordinator_far_away_is_given_more_time_with_each_attempt(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(endpoint: str, secret: bytes, patience_s: float) -> Control:
        if patience_s < 1.5:  # five round trips of 0.3 s
            raise StoreTimeout("no answer yet", op="check", keys=())
        return open_control(endpoint, secret, patience_s)

    monkeypatch.setattr(links, "open_control", opened)
    with linked(job(port), mint()) as link:
        assert isinstance(link.join("a").action(), Idle)


def test_ranks_have_a_key_that_does_not_open_the_control_server(port: int) -> None:
    key, spec = mint(), job(port)
    with linked(spec, key) as first, linked(spec, key) as second:
        one, two = first.join("a"), second.join("b")
        assert (first.endpoint.coordinates, second.endpoint.coordinates) == (True, False)
        assert one.settings == two.settings
        settings = one.settings
        assert settings.store != spec.endpoint
        assert settings.job_key not in (key.raw, control_key(key, str(spec.endpoint), "").raw)
        ranks = NetworkStore(f"tcp://{settings.store}", JobKey(settings.job_key))
        with contextlib.closing(ranks):
            assert ranks.list_keys() == []
        with pytest.raises(StoreRefused):
            open_control(f"tcp://{spec.endpoint}", settings.job_key, PATIENCE_S)


@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGUSR1, False), (signal.SIGTERM, True)], ids=["USR1", "TERM"]
)
def test_only_a_signal_that_ends_the_job_ends_the_search_for_it(
    number: signal.Signals, ends: bool
) -> None:
    """A batch system may send SIGUSR1 at any time, for the ranks."""
    spec = job(1)
    with caught_signals(spec.signals) as signals:
        os.kill(os.getpid(), number)
        if ends:
            with pytest.raises(Interrupted) as caught:
                pause(spec.signals, signals, PATIENCE_S)
            assert caught.value.number == number
        else:
            pause(spec.signals, signals, 0.01)


def test_ctrl_c_ends_the_wait_for_hosts_that_do_not_read_the_end_of_the_job(port: int) -> None:
    spec, key = replace(job(port), lease_s=PATIENCE_S), mint()
    with caught_signals(spec.signals) as signals:
        first = HostEndpoint(spec, key, signals=signals, say=lambda line: None)
        with contextlib.closing(first), linked(spec, key) as second:
            control = first.reach(settings_of(spec), first=True)
            second.join("b")
            os.kill(os.getpid(), signal.SIGINT)
            began = time.monotonic()
            first.see_others_off("a", PATIENCE_S)
            assert time.monotonic() - began < PATIENCE_S / 2
            control.close()


@pytest.mark.parametrize("taken", [False, True])
def test_who_finds_nobody_says_so_and_names_a_port_that_is_taken(
    port: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_REPORT_S", 0.0)
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        if taken:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        spec = replace(job(port, join_timeout_s=1.0), serves=taken)
        link = stack.enter_context(linked(spec, mint(), said.append))
        with pytest.raises(LaunchError, match="cannot be reached") as caught:
            link.join("a")
    assert len(said) == 1
    for text in (said[0], caught.value.seen):
        assert (f"port {port} of this host cannot be used" in text) == taken


@pytest.mark.parametrize(
    ("silence", "conf", "lease_s"), [("", None, 15), ("45", None, 45), ("45", 7.5, 7.5)]
)
def test_a_lease_lasts_15_s_or_as_long_as_a_host_may_be_silent_or_as_set(
    monkeypatch: pytest.MonkeyPatch, silence: str, conf: float | None, lease_s: float
) -> None:
    monkeypatch.setenv("DURE_SILENCE", silence)
    assert settings_of(replace(job(1), lease_s=conf)).lease_s == lease_s


def test_a_host_with_another_build_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    key, spec = mint(), job(port)
    with linked(spec, key) as first, linked(spec, key) as second:
        first.join("a")
        monkeypatch.setattr(network, "own_build", lambda: Build(1, "9.8.7"))
        with pytest.raises(UsageError, match="another build of Dure") as caught:
            second.join("b")
        assert "9.8.7" in caught.value.seen
        assert own_build().version in caught.value.seen
