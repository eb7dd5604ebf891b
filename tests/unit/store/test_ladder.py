"""The ladder of stores: whoever loses the store finds the same next one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest

from dure.errors import StoreLost, StoreRefused, StoreTimeout
from dure.store.address import resolve
from dure.store.base import Store
from dure.store.key import JobKey, mint
from dure.store.ladder import Ladder, rungs_of
from dure.store.listener import listen
from dure.store.server import StoreServer

KEY = mint()


class Crew:
    """A few members, each with a server of its own, that share a ladder."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def server(self, key: JobKey = KEY, port: int = 0) -> StoreServer:
        server = StoreServer(listen(resolve("127.0.0.1", port)), key)
        self._stack.callback(server.stop)
        return server

    def ladder(self, *rungs: StoreServer, own: StoreServer | None = None) -> Ladder:
        ladder = Ladder(
            [address(rung) for rung in rungs],
            KEY,
            own=None if own is None else address(own),
            timeout=timedelta(seconds=5),
        )
        self._stack.callback(ladder.close)
        return ladder

    def close(self) -> None:
        self._stack.close()


def address(server: StoreServer) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


def three(crew: Crew) -> tuple[list[StoreServer], list[Ladder]]:
    servers = [crew.server() for _ in range(3)]
    first = crew.ladder(servers[0], own=servers[0])
    first.lead()
    ladders = [first]
    for server in servers[1:]:
        ladder = crew.ladder(servers[0], own=server)
        ladder.join(5)
        ladder.stand_by()
        ladders.append(ladder)
    for ladder in ladders:
        ladder.refresh()
    return servers, ladders


def test_members_learn_all_rungs_in_order(crew: Crew) -> None:
    servers, ladders = three(crew)
    for ladder in ladders:
        assert ladder.addresses == tuple(map(address, servers))
        assert rungs_of(ladder.current) == ladder.addresses
    assert [ladder.leading for ladder in ladders] == [True, False, False]


def test_after_a_death_all_go_to_the_next_rung_that_its_owner_has_seeded(crew: Crew) -> None:
    servers, ladders = three(crew)
    servers[0].stop()

    def seed(store: Store) -> None:
        store.set("known", "to the second")

    found: list[bytes] = []
    last = threading.Thread(target=lambda: found.append(ladders[2].advance(10).get("known")))
    last.start()  # it comes to a standby, and waits for its owner
    ladders[1].advance(10, seed)
    last.join(10)
    assert found == [b"to the second"]
    assert ladders[1].address == ladders[2].address == address(servers[1])


def test_two_deaths_at_once_leave_the_third(crew: Crew) -> None:
    servers, ladders = three(crew)
    servers[0].stop()
    servers[1].stop()
    ladders[2].advance(10)
    assert ladders[2].leading
    assert ladders[2].address == address(servers[2])


def test_a_member_that_lost_only_its_connection_stays_on_its_rung(crew: Crew) -> None:
    servers, ladders = three(crew)
    ladders[0].current.set("here", "1")
    assert ladders[1].advance(5).get("here") == b"1"
    assert ladders[1].address == address(servers[0])


def test_a_follower_without_a_living_rung_gets_store_lost(crew: Crew) -> None:
    servers, _ = three(crew)
    guest = crew.ladder(servers[0])
    guest.join(5)
    for server in servers:
        server.stop()
    with pytest.raises(StoreLost):
        guest.advance(0.2)


def test_a_store_started_afresh_is_told_where_the_job_has_gone(crew: Crew) -> None:
    servers, ladders = three(crew)
    servers[0].stop()
    ladders[1].advance(5)
    assert ladders[1].revived() is None
    again = crew.server(port=servers[0].port)
    newcomer = crew.ladder(again, own=again)
    newcomer.lead()
    assert ladders[1].revived() == (address(again), False)
    ladders[1].redirect(address(again))
    assert newcomer.moved() == address(servers[1])
    newcomer.follow(address(servers[1]), address(crew.server()), 5)
    assert newcomer.addresses[-1] not in map(address, [*servers, again])
    assert newcomer.address == address(servers[1])
    stranger = crew.ladder(again)
    stranger.join(5)
    assert stranger.address == address(servers[1])


def test_who_leads_looks_at_the_endpoint_whatever_it_has_gone_through(crew: Crew) -> None:
    servers, ladders = three(crew)
    leader, port = ladders[1], servers[0].port
    servers[0].stop()
    leader.advance(5)
    newcomer = crew.server(port=port)
    crew.ladder(newcomer, own=newcomer).lead()
    assert leader.revived() == (address(newcomer), False)
    leader.redirect(address(newcomer))
    assert leader.advance(5) is leader.current  # its connection broke by chance
    assert leader.address == address(servers[1])
    newcomer.stop()
    another = crew.server(port=port)
    crew.ladder(another, own=another).lead()
    assert any(leader.revived() == (address(another), False) for _ in range(5))


def test_a_store_that_was_told_where_the_job_is_lets_others_in_when_the_job_comes_to_it(
    crew: Crew,
) -> None:
    first, second = crew.server(), crew.server()
    above, below = crew.ladder(first, own=first), crew.ladder(first, own=second)
    above.lead()
    below.join(5)
    below.stand_by()
    port = first.port
    above.close()
    first.stop()
    below.advance(5)
    again = crew.server(port=port)
    newcomer = crew.ladder(again, own=again)
    newcomer.lead()
    below.redirect(address(again))
    third = crew.server()
    newcomer.follow(address(second), address(third), 5)
    below.close()
    second.stop()
    newcomer.advance(5)
    assert newcomer.leading
    assert newcomer.revived() == (address(again), False)  # its note names a rung that is gone
    newcomer.redirect(address(again))
    late = crew.ladder(again)
    late.join(5)
    assert late.address == address(third)


def test_a_store_started_afresh_is_passed_by_on_the_way_down(crew: Crew) -> None:
    servers, ladders = three(crew)
    servers[0].stop()
    again = crew.server(port=servers[0].port)
    newcomer = crew.ladder(again, own=again)
    newcomer.lead()
    for ladder in ladders[1:]:
        ladder.advance(5)
        assert ladder.address == address(servers[1])
    assert ladders[1].revived() == (address(again), False)


def test_members_that_disagree_on_the_order_do_not_wait_for_each_other_for_ever(crew: Crew) -> None:
    servers, ladders = three(crew)
    left, right = ladders[1:]
    servers[0].stop()
    left._addresses.sort(key=lambda rung: rung == left._own)  # pyright: ignore[reportPrivateUsage]
    right._addresses.sort(key=lambda rung: rung == right._own)  # pyright: ignore[reportPrivateUsage]
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(ladder.advance, 2.0) for ladder in (left, right)]:
            future.result()
    assert left.address == right.address


def test_a_store_that_never_died_is_known_by_its_id(crew: Crew) -> None:
    servers, ladders = three(crew)
    lower = ladders[1]
    lower._open_own(None)  # pyright: ignore[reportPrivateUsage] (as after a cut of the network)
    assert lower.revived() == (address(servers[0]), True)


def test_a_wrong_key_is_refused_at_once(crew: Crew) -> None:
    other = crew.server(mint())
    with pytest.raises(StoreRefused) as caught:
        crew.ladder(other).join(60)
    assert KEY.fingerprint in caught.value.seen


def test_a_stranger_at_the_place_of_a_dead_rung_keeps_nobody_from_the_next(crew: Crew) -> None:
    servers, ladders = three(crew)
    servers[0].stop()
    crew.server(mint(), port=servers[0].port)
    for ladder in ladders[1:]:
        ladder.advance(3.0)
    assert ladders[1].address == ladders[2].address
    assert ladders[1].address in map(address, servers[1:])
    assert [ladder.revived() for ladder in ladders[1:] if ladder.leading] == [None]


def test_a_look_at_the_rungs_above_ends_at_the_first_that_is_silent(crew: Crew) -> None:
    own = crew.server()
    with ExitStack() as stack:
        hosts = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        silent = [f"127.0.0.1:{host.getsockname()[1]}" for host in hosts]
        leader = Ladder(silent, KEY, own=address(own))
        stack.callback(leader.close)
        leader.lead()
        leader._addresses = [*silent, address(own)]  # pyright: ignore[reportPrivateUsage]
        leader._patience_s = 0.05  # pyright: ignore[reportPrivateUsage]
        for host in [*hosts, hosts[0]]:
            assert leader.revived() is None
            assert [is_called(other) for other in hosts] == [other is host for other in hosts]


def test_silent_hosts_take_none_of_the_time_to_find_the_next_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, visits = [0.0], list[str]()
    time = SimpleNamespace(monotonic=lambda: clock[0], sleep=bool)
    monkeypatch.setattr("dure.store.ladder.time", time)

    def visit(endpoint: str, *_: object, patience_s: float) -> None:
        visits.append(endpoint)
        clock[0] += patience_s
        raise StoreTimeout("silent")

    monkeypatch.setattr("dure.store.ladder.NetworkStore", visit)
    guest = Ladder(["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"], KEY, patience_s=2.0)
    with pytest.raises(StoreTimeout):
        guest.join(5.0)
    assert clock[0] == 12.0  # twice past all three: after the first time 5 s are left
    assert len(visits) == 6


def is_called(host: socket.socket) -> bool:
    """Tell whether somebody has connected since the last time."""
    host.setblocking(False)
    calls = 0
    with suppress(BlockingIOError):
        while True:
            host.accept()[0].close()
            calls += 1
    return calls > 0


def test_nobody_at_the_endpoint_is_a_timeout(crew: Crew) -> None:
    server = crew.server()
    server.stop()
    with pytest.raises(StoreTimeout):
        crew.ladder(server).join(0.1)


def test_an_owner_that_stood_still_follows_the_others_and_leaves_a_note(crew: Crew) -> None:
    servers, ladders = three(crew)
    upper, lower = ladders[0], ladders[1]
    assert upper.successor() is None
    lower._open_own(None)  # pyright: ignore[reportPrivateUsage] (the upper one seemed dead)
    assert upper.successor() == address(servers[1])
    upper.follow(address(servers[1]), address(crew.server()), 5)
    assert lower.revived() is None
    assert ladders[2].advance(5).endpoint.endswith(f":{servers[1].port}")
