"""The coordinator: requests in, answers out, at times that the test chooses."""

from dataclasses import replace

import msgspec
import pytest

from dure.errors import StoreError
from dure.launch.agent.coordinator import Coordinator
from dure.launch.agent.events import Ended, Event, Idle, Joined, Lost, RunRound, Settings
from dure.launch.agent.messages import (
    Accepted,
    Admitted,
    Answer,
    Gone,
    Heartbeat,
    JoinRequest,
    LeaveRequest,
    Message,
    NoJob,
    Refusal,
    View,
    WatchRequest,
    pack,
    read_answer,
)
from dure.launch.agent.state import JobPhase
from dure.store.wire import StoreRequest

SETTINGS = Settings(min_hosts=2, max_hosts=2, max_restarts=9, run_id="job", lease_s=10.0)


class Job:
    """A coordinator and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.coordinator = Coordinator(self.joining("").state("job"), b"name")
        self.state = self.coordinator.state

    def joining(self, agent: str, **other: object) -> JoinRequest:
        joining = JoinRequest(Joined(agent, f"host-{agent}", 2), agent.encode(), SETTINGS, False)
        return msgspec.structs.replace(joining, **other)

    def ask(self, message: Message, client: str = "", timeout_s: float = 0.0) -> Answer | None:
        """Put a request; None: it waits."""
        request = StoreRequest("control", values=(pack(message),), timeout_s=timeout_s)
        answers = self.coordinator.handle(client.encode(), request, self.now)
        for found, reply in [*answers, *self.coordinator.expire(self.now)]:
            if found == client.encode():
                return read_answer(reply.values[0])
        return None

    def join(self, agent: str, **other: object) -> Answer | None:
        return self.ask(self.joining(agent, **other), agent)

    def tell(self, agent: str, *events: Event) -> Answer | None:
        return self.ask(Heartbeat(agent, agent.encode(), events), agent)

    def watch(self, agent: str, seen: int) -> Answer | None:
        return self.ask(WatchRequest(agent, agent.encode(), seen), f"{agent} watches", 60.0)

    def view(self, agent: str) -> View:
        view = self.watch(agent, -1)
        assert isinstance(view, View)
        return view


@pytest.fixture
def job() -> Job:
    """Return a job of two hosts whose first round runs."""
    job = Job()
    for agent in "ab":
        assert isinstance(job.join(agent), Admitted)
    return job


def test_a_watch_is_answered_when_the_agents_own_action_changes_and_not_before() -> None:
    job = Job()
    job.join("a")
    first = job.view("a")
    assert isinstance(first.action, Idle)
    assert job.watch("a", first.revision) is None  # it waits
    job.join("b")
    later = job.view("a")
    assert later.revision > first.revision
    view = job.view("b")
    assert isinstance(view.action, RunRound)
    assert job.watch("b", view.revision) is None
    job.now = 11.0
    job.tell("b")
    answers = dict(job.coordinator.expire(60.0))
    assert b"b watches" in answers  # its time is over


@pytest.mark.parametrize(
    "late",
    [
        Heartbeat("b", b"b", (Lost("a"),)),
        WatchRequest("b", b"b"),
        LeaveRequest("b", b"b"),
        LeaveRequest("a", b"a guess"),
    ],
    ids=str,
)
def test_who_was_given_up_or_is_no_member_changes_nothing(job: Job, late: Message) -> None:
    job.now = 11.9
    assert job.tell("a") == Accepted()  # which renews its lease
    job.now = 12.1  # b's lease of 10 s and the margin of 2 s are over
    job.coordinator.expire(job.now)
    assert job.state.agents == ("a",)
    assert job.coordinator.next_deadline() == pytest.approx(23.9)
    before = pack(job.state)
    assert job.ask(late, "b") == Gone()
    assert pack(job.state) == before


def test_a_host_that_comes_back_takes_the_place_of_its_former_member(job: Job) -> None:
    for _ in range(2):  # the first answer was lost
        assert isinstance(job.join("c", former="b"), Admitted)
        assert job.state.agents == ("a", "c")
    assert job.join("b") == Gone()  # a late request revives nobody
    assert job.state.agents == ("a", "c")


def test_a_job_that_is_over_is_joined_only_by_its_members_to_learn_how(job: Job) -> None:
    for agent in "ab":
        job.tell(agent, Ended(agent, 0, well=True))
    assert job.state.phase is JobPhase.OVER
    assert job.join("c") == NoJob()
    assert isinstance(job.join("b"), Admitted)  # the first answer was lost
    assert isinstance(job.join("d", former="b"), Admitted)
    assert not job.coordinator.is_left.is_set()
    for agent in "ad":
        job.ask(LeaveRequest(agent, agent.encode()))
    assert job.coordinator.is_left.is_set()


@pytest.mark.parametrize(
    ("settings", "elastic", "seen"),
    [
        (replace(SETTINGS, max_restarts=1), False, "--max-restarts: 9 there, 1 here"),
        (replace(SETTINGS, max_hosts=3), False, "--nnodes: 2:2 there, 2:3 here"),
        (replace(SETTINGS, run_id="x"), False, "--rdzv-id: job there, x here"),
        (SETTINGS, True, "--elastic: False there, True here"),
        (replace(SETTINGS, run_id=""), False, ""),  # takes any name
    ],
)
def test_a_host_with_other_flags_is_refused(settings: Settings, elastic: bool, seen: str) -> None:
    job = Job()
    job.join("a")
    answer = job.join("b", settings=settings, elastic=elastic)
    assert answer == Refusal(seen) if seen else isinstance(answer, Admitted)


def test_what_is_no_message_is_refused_and_keeps_nothing() -> None:
    job = Job()
    for request in (
        StoreRequest("control", values=(b"\xc1",)),
        StoreRequest("set", ("k",), (b"v",)),
    ):
        with pytest.raises(StoreError):
            job.coordinator.handle(b"x", request, 0.0)
    hello = job.coordinator.handle(b"x", StoreRequest("check"), 0.0)
    assert hello[0][1].values == (b"name",)
