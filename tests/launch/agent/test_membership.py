"""Agents that share a job's state: what they tell is there once, whatever is lost on the way."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure import version
from dure.errors import StoreLost, StoreTimeout, UsageError
from dure.launch.agent import membership
from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import Event, Failed, Joined, Settings
from dure.launch.agent.machine import Machine, Phase
from dure.launch.agent.membership import STATE, Member, open_shared
from dure.launch.spec import Exit, RankResult
from dure.store.address import resolve
from dure.store.builds import own_build
from dure.store.identity import host_name
from dure.store.key import mint
from dure.store.listener import listen
from dure.store.memory import HashStore
from dure.store.server import StoreServer
from dure.store.shared import EVERYTHING, Shared
from tests.store.procs.relay import Relay
from tests.waiting import PATIENCE_S, until

TERMS = Settings(
    min_hosts=1, max_hosts=3, max_restarts=99, run_id="job", lease_s=PATIENCE_S, margin_s=50.0
)
TWO = replace(TERMS, min_hosts=2, max_hosts=2)

made: list[Member] = []


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


class Noted(Member):
    """A member that is closed after the test."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        made.append(self)


class Quiet(Noted):
    """A member without threads: the test says when it writes."""

    def _start(self) -> None:
        pass

    def speak(self) -> None:
        if self._pending:
            with contextlib.suppress(StoreTimeout):
                self._tell_all(list(self._pending))


class Lossy(HashStore):
    """A store whose transactions happen or not, with answers that are lost or not."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.draw = draw

    def transact(
        self, expect: Mapping[str, bytes | None], write: Mapping[str, bytes | None]
    ) -> bool:
        fate = self.draw.random()
        if fate < 0.2:
            raise StoreTimeout("the request was lost")
        done = super().transact(expect, write)
        if fate < 0.4:
            raise StoreTimeout("the answer was lost")
        return done


def joined(
    member: Member,
    host: str,
    terms: Settings = TERMS,
    *,
    kind: type[Machine] = ElasticMachine,
    begins: bool = True,
    former: str = "",
) -> bool:
    told = Joined(member.agent, host, 2)
    return member.join(told, kind(terms), begins=begins, former=former)


def death(member: Member, local: int, times: int) -> Failed:
    worker = RankResult(rank=local, host="h", pid=times, exit=Exit(signal=9))
    return Failed(member.agent, 0, local, worker, times)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), deaths=st.lists(st.integers(0, 5), max_size=12))
def test_each_death_counts_once_whatever_answers_are_lost(seed: int, deaths: list[int]) -> None:
    """Of 3 agents with 2 workers each, `deaths` names who dies: agent 0, 0, 1, 1, 2, 2."""
    draw = random.Random(seed)
    store = Lossy(draw)
    members: list[Quiet] = []
    for number in range(3):
        member = Quiet(store)
        while True:
            with contextlib.suppress(StoreTimeout):
                assert joined(member, f"h{number}")
                break
        members.append(member)
    for member in members:
        member._take(*store.look("dure/", EVERYTHING, 0.0))
    counted = [0] * 6
    for slot in deaths:
        members[slot // 2].tell(death(members[slot // 2], slot % 2, counted[slot]))
        counted[slot] += 1
        draw.choice(members).speak()
    while not all(member.settled for member in members):
        draw.choice(members).speak()
    _, keys = store.look("dure/", EVERYTHING, 0.0)
    for member in members:
        member._take(*store.look("dure/", EVERYTHING, 0.0))
        state = member.machine()
        assert sorted(state.agents) == sorted(m.agent for m in members)
        assert state.restarts == len(deaths)
    assert len(keys) == 4
    while made:
        made.pop().close()


def test_who_was_given_up_writes_nothing_any_more() -> None:
    store = HashStore()
    one, two = Quiet(store), Quiet(store)
    assert joined(one, "h1", TWO) and joined(two, "h2", TWO)
    store.release(f"dure/members/{two.agent}")
    two.tell(death(two, 0, 0))
    two.speak()
    assert two.gone
    one._take(*store.look("dure/", EVERYTHING, 0.0))
    one.speak()
    assert one.machine().agents == (one.agent,)
    assert one.machine().restarts == 0
    again = Quiet(store)
    assert joined(again, "h2", TWO, former=two.agent)
    assert again.machine().agents == (one.agent, again.agent)


def test_a_job_that_nobody_is_in_any_more_is_begun_anew_by_who_may() -> None:
    store = HashStore()
    one = Quiet(store)
    assert joined(one, "h1")
    store.release(f"dure/members/{one.agent}")
    assert not joined(Quiet(store), "h2", begins=False)
    two = Quiet(store)
    assert joined(two, "h2")
    assert two.machine().agents == (two.agent,)


def test_the_deadline_counts_from_when_a_renewal_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(membership, "boottime", lambda: now[0])

    class Slow(HashStore):
        def hold(self, key: str, value: bytes, ttl_s: float) -> None:
            now[0] += 3
            super().hold(key, value, ttl_s)

    member = Quiet(Slow())
    assert joined(member, "h")
    assert member.expires_at == 1000.0 + TERMS.lease_s
    now[0] = member.expires_at
    assert not member.gone
    now[0] += 1
    assert member.gone


def test_whose_key_has_vanished_is_lost_and_the_others_say_so() -> None:
    store = HashStore()
    silent, other = Quiet(store), Noted(store)
    assert joined(silent, "h1", replace(TERMS, lease_s=600.0))
    assert joined(other, "h2")  # whose lease is the job's
    assert silent.expires_at < other.expires_at
    store.release(f"dure/members/{silent.agent}")  # as if it had expired
    until(lambda: other.machine().agents == (other.agent,))
    (note,) = other.machine().notes
    assert note == "lost h1 (nothing was heard of it for 650 s); the others go on"


@pytest.mark.parametrize(
    ("kind", "terms", "seen"),
    [
        (ElasticMachine, replace(TERMS, max_restarts=1), "--max-restarts: 99 there, 1 here"),
        (ElasticMachine, replace(TERMS, max_hosts=2), "--nnodes: 1:3 there, 1:2 here"),
        (ElasticMachine, replace(TERMS, run_id="x"), "--rdzv-id: job there, x here"),
        (Machine, TERMS, "--elastic: True there, False here"),
    ],
)
def test_who_was_told_other_things_is_refused(
    kind: type[Machine], terms: Settings, seen: str
) -> None:
    store = HashStore()
    first, odd = Quiet(store), Quiet(store)
    assert joined(first, "h1")
    with pytest.raises(UsageError) as caught:
        joined(odd, "h2", terms, kind=kind)
    assert caught.value.seen == seen
    first._take(*store.look("dure/", EVERYTHING, 0.0))
    assert first.machine().agents == (first.agent,)
    assert joined(Quiet(store), "h3", replace(TERMS, run_id=""))  # which takes any


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (["9.8.7", 3, "far"], "9.8.7 on far"),
        (["0.1.0", {"type": "rounds"}], "0.1.0 on the job's other hosts"),
        (b"\xc1", "an unknown build"),
        (b"\x91\xa1\xff", "an unknown build"),
        (b"{}", "an unknown build"),
    ],
)
def test_another_build_is_refused_by_name_and_left_alone(state: object, named: str) -> None:
    store = HashStore()
    packed = state if isinstance(state, bytes) else msgspec.msgpack.encode(state)
    store.set(STATE, packed)
    store.hold("dure/members/theirs", b"nonce", PATIENCE_S)
    with pytest.raises(UsageError) as caught:
        joined(Quiet(store), "h")
    seen = caught.value.seen or ""
    assert named in seen
    assert f"{own_build()} on {host_name()}" in seen
    assert store.get(STATE) == packed


def test_a_job_of_another_build_without_hosts_is_replaced() -> None:
    store = HashStore()
    store.set(STATE, msgspec.msgpack.encode(["9.8.7", 3, "far"]))
    assert joined(Quiet(store), "h")


def test_a_refusal_of_an_earlier_job_does_not_end_the_next() -> None:
    store = HashStore()
    store.set("dure/refused", "9.8.7 on far")
    first = Quiet(store)
    assert joined(first, "h1", TWO)
    first.speak()
    assert first.machine().phase is not Phase.OVER


@pytest.mark.parametrize(("terms", "ends"), [(TWO, True), (TERMS, False)])
def test_hosts_that_wait_for_one_of_another_build_end_at_once(
    terms: Settings, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    first, odd = Quiet(store), Quiet(store)
    assert joined(first, "h1", terms)
    with monkeypatch.context() as patched:
        patched.setattr(version, "VERSION", "9.8.7")
        with pytest.raises(UsageError):
            joined(odd, "h2", terms)
    first._take(*store.look("dure/", EVERYTHING, 0.0))
    first.speak()
    first._take(*store.look("dure/", EVERYTHING, 0.0))
    state = first.machine()
    assert (state.phase is Phase.OVER) == ends
    if ends:
        assert state.outcome is not None
        assert "9.8.7" in state.outcome.why
        assert str(own_build()) in state.outcome.why


# --- over a network -----------------------------------------------------------------------------


@contextlib.contextmanager
def served(
    presence: Callable[[str, bool], None], relay: contextlib.ExitStack
) -> Iterator[tuple[Shared, Shared, Relay]]:
    """Yield two ways to one server, of which the second leads through a relay, which ends first."""
    key = mint()
    server = StoreServer(listen(resolve("127.0.0.1", 0)), key, presence)
    try:
        with relay:
            between = relay.enter_context(Relay(server.port))
            yield (
                open_shared(f"tcp://127.0.0.1:{server.port}", key.raw, PATIENCE_S),
                open_shared(f"tcp://127.0.0.1:{between.port}", key.raw, PATIENCE_S),
                between,
            )
    finally:
        server.stop()


def test_connections_that_are_reset_are_opened_again_and_nothing_is_lost() -> None:
    heard: list[tuple[str, bool]] = []
    with served(lambda key, there: heard.append((key, there)), contextlib.ExitStack()) as (
        near,
        far,
        relay,
    ):
        one, two = Noted(near), Noted(far)
        assert joined(one, "h1", TWO) and joined(two, "h2", TWO)
        told: list[Event] = [death(two, 0, times) for times in range(9)]
        for number, event in enumerate(told):
            two.tell(event)
            if number % 3 == 0:
                until(lambda: relay.cut() > 0)
        until(lambda: one.machine().restarts == 9)
        until(lambda: two.settled)
        assert (one.gone, two.gone) == ("", "")
        assert one.machine().agents == (one.agent, two.agent)
        assert (f"dure/members/{two.agent}", False) in heard
        while made:
            made.pop().close()


def test_a_connection_that_is_not_opened_again_stops_the_round() -> None:
    def presence(key: str, there: bool) -> None:
        made[0].note_presence(key, there)

    ending = contextlib.ExitStack()
    with served(presence, ending) as (near, far, _):
        one, two = Noted(near), Noted(far)
        assert joined(one, "h1", TWO, kind=Machine) and joined(two, "h2", TWO, kind=Machine)
        until(lambda: one.machine().phase is Phase.RUNNING)
        ending.close()
        until(lambda: one.machine().phase is Phase.STOPPING)
        assert one.machine().agents == (one.agent, two.agent)  # not given up yet
        assert one.machine()._faults.lost == {two.agent: "its connection broke"}
        while made:
            made.pop().close()


@pytest.mark.parametrize("ended", [True, False])
def test_a_member_does_not_wait_for_its_deadline_when_the_coordinator_has_ended(
    ended: bool,
) -> None:
    asked = threading.Event()

    class Lost(HashStore):
        def renew(self, key: str) -> bool:
            raise StoreLost("the connection broke")

        def server_has_ended(self) -> bool:
            asked.set()
            return ended

    member = Noted(Lost())
    assert joined(member, "h", replace(TERMS, lease_s=600.0))
    assert asked.wait(PATIENCE_S)
    if ended:
        until(lambda: member.gone, "the end of the membership")
        assert member.gone == "the coordinator's launcher has ended"
    else:  # it may be the network: the deadline decides
        asked.clear()
        assert asked.wait(PATIENCE_S)
        assert not member.gone
