"""A host's membership: what it sends and when, and its two threads over real connections."""

import contextlib
import select
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dure.errors import StoreLost
from dure.launch.agent.control import CoordinatorClient
from dure.launch.agent.coordinator import Coordinator
from dure.launch.agent.events import (
    Expired,
    Failed,
    Idle,
    Joined,
    RunRound,
    Settings,
)
from dure.launch.agent.membership import HostMember, HostMembership, boottime
from dure.launch.agent.messages import (
    Accepted,
    Admitted,
    Answer,
    Control,
    Gone,
    Heartbeat,
    JoinRequest,
    Message,
    View,
)
from dure.launch.spec import Exit, RankResult
from dure.store.address import resolve
from dure.store.key import mint
from dure.store.listener import listen
from dure.store.server import StoreServer
from tests.store.procs.relay import Relay
from tests.waiting import PATIENCE_S, until

SETTINGS = Settings(
    min_hosts=1, max_hosts=2, max_restarts=99, run_id="job", lease_s=PATIENCE_S, margin_s=50.0
)


def membership(settings: Settings = SETTINGS, sent: float = 100.0) -> HostMembership:
    return HostMembership(Joined("me", "h", 1), b"nonce", settings, sent)


def test_the_deadline_counts_from_when_the_acknowledged_renewal_was_sent() -> None:
    member = membership(replace(SETTINGS, lease_s=10.0))
    assert member.deadline == 110.0
    request = member.next_request(104.0)
    assert request is not None
    assert request == Heartbeat("me", b"nonce")
    member.answered(request, Accepted(), 104.0, 109.0)
    assert member.deadline == 114.0
    assert member.next_request(104.9) is None
    assert member.wake_at(104.9) == 105.0
    member.answered(request, Accepted(), 113.0, 114.5)  # too late: the ranks may be dead already
    assert member.deadline == 114.0
    assert "not reached for 10 s" in member.gone(114.5)


def test_events_are_sent_until_they_are_acknowledged_in_their_order() -> None:
    member = membership()
    member.report(Expired("one"))
    request = member.next_request(100.3)
    assert request is not None
    assert request == Heartbeat("me", b"nonce", (Expired("one"),))
    member.report(Expired("two"))  # while the first is on its way
    member.answered(request, Accepted(), 100.3, 100.4)
    request = member.next_request(100.5)
    assert request is not None
    assert request == Heartbeat("me", b"nonce", (Expired("two"),))
    member.answered(request, Accepted(), 100.5, 100.6)
    assert (member.settled, member.wake_at(100.7)) == (True, 101.5)


def test_a_view_is_kept_until_the_others_have_given_this_host_up() -> None:
    member = membership()
    assert not member.watched(Accepted())
    assert member.watched(View(4, Idle()))
    assert member.next_watch().seen == 4
    assert member.watched(Gone())
    assert member.gone(100.0) == "the others have given this host up"


# --- with threads --------------------------------------------------------------------------------


class Held:
    """A way to a state that answers as the test says."""

    def __init__(self, ended: bool) -> None:
        self.asked, self.ended = threading.Event(), ended

    def ask(self, message: Message, timeout_s: float = 0.0) -> Answer:
        raise StoreLost("the connection broke")

    def has_ended(self) -> bool:
        self.asked.set()
        return self.ended

    def close(self) -> None:
        pass


@pytest.mark.parametrize("ended", [True, False])
def test_a_member_does_not_wait_for_its_deadline_when_the_coordinator_has_ended(
    ended: bool,
) -> None:
    control = Held(ended)
    settings = replace(SETTINGS, lease_s=600.0)
    with contextlib.closing(HostMember(control, membership(settings, boottime()))) as member:
        assert control.asked.wait(PATIENCE_S)
        if ended:
            until(lambda: member.gone, "the end of the membership")
            assert member.gone == "the coordinator's launcher has ended"
        else:  # it may be the network: the deadline decides
            control.asked.clear()
            assert control.asked.wait(PATIENCE_S)
            assert not member.gone


def admitted(control: Control, name: str) -> HostMember:
    joined = Joined(name, name, 1)
    joining = JoinRequest(joined, name.encode(), SETTINGS, elastic=True)
    sent, answer = boottime(), control.ask(joining)
    assert isinstance(answer, Admitted)
    return HostMember(control, HostMembership(joined, joining.nonce, answer.settings, sent))


@contextlib.contextmanager
def served() -> Iterator[tuple[Coordinator, Control, Relay]]:
    """Run a coordinator; yield a connection to it that leads through a relay."""
    key = mint()
    coordinator = Coordinator(
        JoinRequest(Joined("", "", 0), b"", SETTINGS, elastic=True).state("job")
    )
    server = StoreServer(listen(resolve("127.0.0.1", 0)), key, board=coordinator)
    try:
        with Relay(server.port) as relay:
            yield (
                coordinator,
                CoordinatorClient(f"tcp://127.0.0.1:{relay.port}", key.raw, PATIENCE_S),
                relay,
            )
    finally:
        server.stop()


def work(member: HostMember) -> None:
    """Take part in the first round, as soon as the state says so."""
    member.report(Expired("last call 0"))
    while not isinstance(member.action(), RunRound):
        assert select.select([member.fd], [], [], PATIENCE_S)[0]  # news wakes the agent


def test_connections_that_are_reset_are_opened_again_and_nothing_is_lost() -> None:
    with (
        served() as (coordinator, control, relay),
        contextlib.closing(admitted(control, "one")) as member,
    ):
        work(member)
        for times in range(9):
            worker = RankResult(rank=0, host="h", pid=times, exit=Exit(signal=9))
            member.report(Failed("one", 0, 0, worker, times))
            if times % 3 == 0:
                until(lambda: relay.cut() > 0)
        until(lambda: coordinator.state.restarts == 9)
        assert (coordinator.state.agents, member.gone) == (("one",), "")
        member.leave()
        assert coordinator.is_left.wait(PATIENCE_S)
