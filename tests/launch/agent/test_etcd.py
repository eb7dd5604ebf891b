"""The job's state in etcd: two agents that change one key."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dure.launch.agent.etcd import EtcdControl, EtcdJobEndpoint
from dure.launch.agent.events import Ended, Idle, Joined, RunRound, Settings
from dure.launch.agent.messages import (
    Accepted,
    Admitted,
    Answer,
    Gone,
    Heartbeat,
    JoinRequest,
    LeaveRequest,
    NoJob,
    Refusal,
    View,
    WatchRequest,
)
from dure.launch.signals import caught_signals
from dure.launch.spec import JobSpec
from dure.store.etcd_gateway import EtcdConnection, EtcdOptions
from dure.store.etcd_requests import Json
from tests.store.procs import etcd
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.needs("etcd")
SETTINGS = Settings(min_hosts=2, max_hosts=2, run_id="job", lease_s=20.0)


@pytest.fixture
def server() -> Iterator[etcd.Etcd]:
    with etcd.etcd() as found:
        yield found


@contextlib.contextmanager
def control(server: etcd.Etcd) -> Iterator[EtcdControl]:
    with contextlib.closing(
        EtcdControl(EtcdOptions(endpoints=(server.names,)), "job", 5.0)
    ) as found:
        yield found


def joins(to: EtcdControl, agent: str, former: str = "", **other: int) -> Answer:
    joined = Joined(agent, f"host-{agent}", 1)
    settings = replace(SETTINGS, **other)
    return to.ask(JoinRequest(joined, agent.encode(), settings, False, former))


def test_two_hosts_join_one_job_and_learn_what_to_do(server: etcd.Etcd) -> None:
    with control(server) as one, control(server) as two:
        assert isinstance(joins(one, "a"), Admitted)
        view = one.ask(WatchRequest("a", b"a"), 5.0)
        assert isinstance(view, View) and isinstance(view.action, Idle)
        assert isinstance(joins(two, "b", max_restarts=3), Refusal)
        assert isinstance(joins(two, "b"), Admitted)
        later = one.ask(WatchRequest("a", b"a", view.revision), 60.0)
        assert isinstance(later, View) and isinstance(later.action, RunRound)
        assert one.ask(Heartbeat("a", b"a")) == Accepted()
        assert two.ask(LeaveRequest("b", b"b")) == Accepted()
        assert two.ask(WatchRequest("b", b"b"), 5.0) == Gone()
        assert one.ask(LeaveRequest("a", b"another")) == Gone()
        assert one.ask(Heartbeat("a", b"a")) == Accepted(), "it keeps its lease"


def test_a_host_that_asks_again_over_another_connection_keeps_its_lease(server: etcd.Etcd) -> None:
    with control(server) as one, control(server) as lost, control(server) as again:
        joins(one, "a")
        assert isinstance(joins(lost, "b"), Admitted)
        assert isinstance(joins(again, "b"), Admitted)
        assert again.ask(Heartbeat("b", b"b")) == Accepted()
        view = again.ask(WatchRequest("b", b"b"), 5.0)
        assert isinstance(view, View) and isinstance(view.action, RunRound)
        assert again.ask(LeaveRequest("b", b"b")) == Accepted()
        assert joins(lost, "b") == Gone()


def test_a_host_that_comes_back_to_no_job_finds_none(server: etcd.Etcd) -> None:
    with control(server) as one:
        assert joins(one, "b", former="a") == NoJob()


def test_ctrl_c_ends_the_wait_for_hosts_that_do_not_read_the_end_of_the_job(
    server: etcd.Etcd,
) -> None:
    spec = JobSpec(program="train.py", endpoint=server.names, run_id="job", rdzv_backend="etcd")
    with caught_signals(spec.signals) as signals, control(server) as two:
        endpoint = EtcdJobEndpoint(spec, signals)
        one = endpoint.reach(SETTINGS, first=True)
        assert one is not None
        with contextlib.closing(one):
            for agent, to in (("a", one), ("b", two)):
                assert isinstance(joins(to, agent, lease_s=PATIENCE_S), Admitted)
            for agent, to in (("a", one), ("b", two)):
                ended = Ended(agent, 0, well=True)
                assert to.ask(Heartbeat(agent, agent.encode(), (ended,))) == Accepted()
            os.kill(os.getpid(), signal.SIGINT)
            began = time.monotonic()
            endpoint.see_others_off("a", PATIENCE_S / 4)
            assert time.monotonic() - began < PATIENCE_S / 8


def test_an_agent_that_waits_asks_for_nothing(
    server: etcd.Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[int] = []
    events = EtcdConnection.events

    def counted(self: EtcdConnection, where: Json, since: int) -> Iterator[int]:
        streams.append(since)
        return events(self, where, since)

    monkeypatch.setattr(EtcdConnection, "events", counted)
    with control(server) as one, control(server) as two, ThreadPoolExecutor(1) as thread:
        joins(one, "a")
        view = one.ask(WatchRequest("a", b"a"), 5.0)
        for agent in "bcd":  # each change is read through the stream that is open
            assert isinstance(view, View)
            waiting = thread.submit(one.ask, WatchRequest("a", b"a", view.revision), 60.0)
            until(lambda: len(streams) == 1)
            assert isinstance(joins(two, agent), Admitted)
            view = waiting.result()
        assert len(streams) == 1
