"""The coordinator: requests in, answers out, at times that the test chooses."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dure import version
from dure.errors import StoreError
from dure.launch.agent import events
from dure.launch.agent.coordinator import Coordinator
from dure.launch.agent.events import Ended, Event, Joined, Lost, Ready, Settings, Stop, Wait, Work
from dure.launch.agent.messages import (
    Accepted,
    Admitted,
    Answer,
    Author,
    Gone,
    Join,
    Joining,
    Leave,
    Message,
    NoJob,
    Refusal,
    Renew,
    Tell,
    View,
    Watch,
    author,
    join,
    pack,
    read_answer,
    why_other_build,
)
from dure.launch.agent.state import Phase
from dure.store.wire import Request

SETTINGS = Settings(min_hosts=2, max_hosts=2, max_restarts=9, run_id="job", lease_s=10.0)


class Job:
    """A coordinator and a clock."""

    def __init__(self, settings: Settings = SETTINGS, *, elastic: bool = False) -> None:
        self.settings, self.elastic, self.now = settings, elastic, 0.0
        self.coordinator = Coordinator(self.joining("").state("job"), b"name")
        self.state = self.coordinator.state

    def joining(self, agent: str, **other: object) -> Joining:
        joined = Joined(agent, f"host-{agent}", 2)
        joining = Joining(joined, agent.encode(), self.settings, self.elastic)
        return msgspec.structs.replace(joining, **other)

    def ask(self, message: Message, client: str = "", timeout_s: float = 0.0) -> Answer | None:
        """Put a request; None: it waits."""
        request = Request("control", values=(pack(message),), timeout_s=timeout_s)
        answers = self.coordinator.handle(client.encode(), request, self.now)
        for found, reply in [*answers, *self.coordinator.expire(self.now)]:
            if found == client.encode():
                return read_answer(reply.values[0])
        return None

    def join(self, agent: str) -> Answer | None:
        return self.ask(join(self.joining(agent)), agent)

    def tell(self, agent: str, *events: Event) -> Answer | None:
        return self.ask(Tell(agent, agent.encode(), events), agent)

    def renew(self, agent: str) -> Answer | None:
        return self.ask(Renew(agent, agent.encode()), agent)

    def watch(self, agent: str, seen: int = 0, timeout_s: float = 60.0) -> Answer | None:
        return self.ask(Watch(agent, agent.encode(), seen), f"{agent} watches", timeout_s)

    def view(self, agent: str) -> View:
        view = self.watch(agent, -1)
        assert isinstance(view, View)
        return view


def running(**settings: float) -> Job:
    """Return a job of two hosts whose first round runs."""
    job = Job(replace(SETTINGS, **settings))
    for agent in "ab":
        assert isinstance(job.join(agent), Admitted)
    assert job.tell("a", Ready("a", 0, "10.0.0.1", 1)) == Accepted()
    return job


def test_a_watch_is_answered_when_the_agents_own_action_changes_and_not_before() -> None:
    job = Job()
    job.join("a")
    first = job.view("a")
    assert isinstance(first.action, Wait)
    assert job.watch("a", first.revision) is None  # parked
    job.join("b")
    request = Request("control", values=(pack(Renew("b", b"b")),))
    job.coordinator.handle(b"b", request, 0.0)
    later = job.view("a")
    assert later.revision > first.revision
    job.tell("a", Ready("a", 0, "10.0.0.1", 1))
    view = job.view("b")
    assert isinstance(view.action, Work)
    assert job.watch("b", view.revision) is None
    job.now = 60.0
    answers = dict(job.coordinator.expire(job.now))
    assert read_answer(answers[b"b watches"].values[0]) in (Accepted(), Gone())


@pytest.mark.parametrize("message", [Tell, Renew, Watch, Leave])
def test_a_member_that_was_given_up_changes_nothing(message: type[Message]) -> None:
    job = running(lease_s=10.0)
    job.now = 11.0
    job.renew("a")
    job.now = 12.5  # b's lease and margin are over
    job.coordinator.expire(job.now)
    assert job.state.agents == ("a",)
    before = pack(job.state)
    requests: list[Message] = [Renew("b", b"b"), Watch("b", b"b"), Leave("b", b"b")]
    requests.append(Tell("b", b"b", (Lost("a"),)))
    for request in requests:
        if isinstance(request, message):
            assert job.ask(request, "b") == Gone()
    assert pack(job.state) == before


def test_a_message_with_another_nonce_is_not_the_members() -> None:
    job = running()
    assert job.ask(Leave("b", b"a guess")) == Gone()
    assert job.state.agents == ("a", "b")


def test_a_lease_counts_from_the_receipt_of_the_last_renewal() -> None:
    job = running(lease_s=10.0, margin_s=2.0)
    job.now = 11.9
    assert job.renew("a") == Accepted()
    job.now = 12.1
    job.coordinator.expire(job.now)
    assert job.state.agents == ("a",)
    job.now = 23.8
    job.coordinator.expire(job.now)
    assert job.state.agents == ("a",)
    assert job.coordinator.next_deadline() == pytest.approx(23.9)


def test_a_broken_connection_stops_the_round_unless_the_next_renewal_opens_it_again() -> None:
    job = running()
    job.coordinator.leave(b"b")
    job.coordinator.expire(job.now)
    job.now = 1.5  # a renewal is due a second after the last one, and takes its time
    job.coordinator.expire(job.now)
    job.ask(Renew("b", b"b"), "b again")
    job.now = 3.0
    job.coordinator.expire(job.now)
    assert job.state.phase is Phase.RUNNING
    job.coordinator.leave(b"b again")
    job.coordinator.expire(job.now)
    job.now = 5.1
    job.coordinator.expire(job.now)
    assert isinstance(job.view("a").action, Stop)
    assert job.state.agents == ("a", "b")  # not given up yet
    assert job.state._faults.lost == {"b": "its connection broke"}


def test_the_reapers_report_is_believed_at_once() -> None:
    job = running()
    assert job.ask(Leave("b", b"b", "its launcher was killed"), "reaper") == Accepted(1)
    assert job.state._faults.lost == {"b": "its launcher was killed"}


def test_a_host_that_comes_back_takes_the_place_of_its_former_member() -> None:
    job = running()
    again = join(job.joining("c", former="b"))
    assert isinstance(job.ask(again), Admitted)
    assert job.state.agents == ("a", "c")
    assert isinstance(job.ask(again), Admitted)  # its answer was lost
    assert job.state.agents == ("a", "c")


def test_a_late_request_to_join_revives_nobody() -> None:
    job = running()
    job.ask(Leave("b", b"b"))
    assert job.join("b") == Gone()
    assert job.state.agents == ("a",)


def test_a_job_that_is_over_is_joined_only_by_its_members_to_learn_how() -> None:
    job = running()
    for agent in "ab":
        job.tell(agent, Ended(agent, 0, well=True))
    assert job.state.phase is Phase.OVER
    assert job.join("c") == NoJob()
    assert isinstance(job.ask(join(job.joining("d", former="b"))), Admitted)


def test_the_coordinator_knows_when_all_have_left() -> None:
    job = running()
    assert not job.coordinator.is_left.is_set()
    for agent in "ab":
        job.ask(Leave(agent, agent.encode()))
    assert job.coordinator.is_left.is_set()


# --- hosts that may not join ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "elastic", "seen"),
    [
        (replace(SETTINGS, max_restarts=1), False, "--max-restarts: 9 there, 1 here"),
        (replace(SETTINGS, max_hosts=3), False, "--nnodes: 2:2 there, 2:3 here"),
        (replace(SETTINGS, run_id="x"), False, "--rdzv-id: job there, x here"),
        (SETTINGS, True, "--elastic: False there, True here"),
    ],
)
def test_a_host_with_other_flags_is_refused(settings: Settings, elastic: bool, seen: str) -> None:
    job = Job()
    job.join("a")
    answer = job.ask(join(job.joining("b", settings=settings, elastic=elastic)))
    assert isinstance(answer, Refusal)
    assert answer.seen == seen
    assert job.state.agents == ("a",)
    unnamed = replace(SETTINGS, run_id="")  # takes any name
    assert isinstance(job.ask(join(job.joining("c", settings=unnamed))), Admitted)


@pytest.mark.parametrize(("least", "ends"), [(2, True), (1, False)])
def test_a_host_of_another_build_is_refused_by_name_and_not_waited_for(
    least: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(replace(SETTINGS, min_hosts=least))
    job.join("a")
    mine = str(author().build)
    with monkeypatch.context() as patched:
        patched.setattr(version, "VERSION", "9.8.7")
        author.cache_clear()
        request = join(job.joining("b"))
    author.cache_clear()
    body = msgspec.structs.replace(request, body=msgspec.Raw(pack("another shape")))
    answer = job.ask(body)
    assert isinstance(answer, Refusal)
    assert "9.8.7" in answer.seen
    assert mine in answer.seen
    assert (job.state.phase is Phase.OVER) == ends
    if ends:
        assert job.state.outcome is not None
        assert "9.8.7" in job.state.outcome.why


def test_the_coordinators_own_launcher_learns_of_a_refusal_before_it_joined() -> None:
    """Otherwise it looked for its own job until the join timeout."""
    job = Job()
    foreign = msgspec.structs.replace(author(), build="9.8.7")
    assert isinstance(job.ask(Join(foreign, msgspec.Raw(pack("another shape")))), Refusal)
    assert job.join("b") == NoJob()
    job.coordinator.own_agent = "a"
    assert isinstance(job.join("a"), Admitted)
    action = job.view("a").action
    assert isinstance(action, events.Leave)
    assert "9.8.7" in action.outcome.why


def test_two_builds_of_the_same_version_are_told_apart() -> None:
    """A checkout was pulled, and has kept its version: the messages' source files differ."""
    job = Job()
    theirs = msgspec.structs.replace(author(), host="far", source="0badc0de")
    answer = job.ask(Join(theirs, msgspec.Raw(pack("another shape"))))
    assert isinstance(answer, Refusal)
    assert f"{theirs.build} on far, with source files 0badc0de" in answer.seen
    assert f"{theirs.build} on {author().host}, with source files {author().source}" in answer.seen
    other = why_other_build(Author("1.2.3", "near"), theirs)
    assert other.seen == f"1.2.3 on near, {theirs.build} on far"


def test_what_is_no_message_is_refused_and_keeps_nothing() -> None:
    job = Job()
    for request in (Request("control", values=(b"\xc1",)), Request("set", ("k",), (b"v",))):
        with pytest.raises(StoreError):
            job.coordinator.handle(b"x", request, 0.0)
    hello = job.coordinator.handle(b"x", Request("check"), 0.0)
    assert hello[0][1].values == (b"name",)
