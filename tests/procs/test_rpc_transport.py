"""Messages between real processes: through shared memory, through sockets, and when some end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import dure
from dure import env, native
from dure.errors import PeerLost, RendezvousError, RpcError
from dure.rpc import meeting
from dure.rpc.envelope import Envelope, Kind
from dure.testing import ProcessPool
from procs.forked_ranks import Ranks, Slot
from procs.relay import Relay
from procs.rpc_echo import Answer, Echo, digest, echo, numbered
from waiting import PATIENCE_S, until

pytestmark = pytest.mark.skipif(not native.available()[0], reason="needs the native engine")

both = pytest.mark.parametrize("shared", [True, False], ids=["memory", "sockets"])

_IDLE_S = 0.5

SIZES = [0, 1, 4096, 4097, 65_536, (1 << 20) + 3]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting"


def closed(agent: Echo) -> None:
    """Leave together: nobody is still asked."""
    dure.barrier()
    agent.transport.close()


# --- what arrives ---------------------------------------------------------------------------------


def everything(rank: int, url: str, shared: bool) -> list[str]:
    agent = echo(url, rank, 2, shared_memory=shared)
    agent.functions[b"back"] = lambda sender, question: agent.get(sender, b"again", question[1])
    for body in (b"", b"x" * 5000, b"y" * 70_000, b"z" * 3_000_000):
        assert agent.get(1 - rank, body) == (body, [])
    for number, nbytes in enumerate(SIZES):
        sent = [numbered(nbytes, number), numbered(7, 3), numbered(0, 0), numbered(nbytes, 4)]
        for to in (1 - rank, rank):
            what, got = agent.get(to, b"tensors", sent)
            assert what == b"tensors"
            assert digest(got) == digest(sent)
            assert not {t.data_ptr() for t in got if len(t)} & {t.data_ptr() for t in sent}
    sent = [numbered(10_000, 9)]
    what, got = agent.get(1 - rank, b"back and again", sent)  # a call within a call
    assert what == b"again"
    assert digest(got) == digest(sent)
    used = native.heap_taken()
    assert not agent.broke
    closed(agent)
    assert (used > 0) == shared  # `got` is still the sender's memory, given to us
    return [thread.name for thread in threading.enumerate() if "rpc" in thread.name]


@both
def test_messages_and_memory_arrive_whole(process_pool, url: str, shared: bool) -> None:
    assert process_pool(2).run(everything, url, shared) == [[], []]


def crowd(rank: int, url: str, shared: bool) -> None:
    agent = echo(url, rank, 3, shared_memory=shared)
    seen, lock = set[bytes](), threading.Lock()

    def count(_: int, question: Answer) -> Answer:
        with lock:
            assert question[0] not in seen
            seen.add(question[0])
        return question

    agent.functions[b"count"] = count
    dure.barrier()
    errors: list[BaseException] = []

    def ask(thread: int) -> None:
        try:
            for first in range(0, 420, 20):
                made = [b"count %d %d %d" % (rank, thread, first + i) for i in range(20)]
                asked = [agent.ask((rank + 1 + thread % 2) % 3, text) for text in made]
                assert [agent.answer(each)[0] for each in asked] == made
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    dure.barrier()
    assert len(seen) == 8 * 420  # of ten thousand among the three
    closed(agent)


@both
def test_ten_thousand_messages_are_neither_lost_nor_doubled(
    process_pool, url: str, shared: bool
) -> None:
    process_pool(3).run(crowd, url, shared)


def without_rings(rank: int, url: str) -> None:
    agent = echo(url, rank, 2)
    taken: list[object] = []
    if rank == 0:
        other = agent.transport.peers.find(1)
        assert other is not None
        process = native.heap_peer(*other.heap)
        assert process is not None
        taken = [native.Outbox.claim(process, other.inbox) for _ in range(16)]
        assert None not in taken
    dure.barrier()
    sent = [numbered(10_000, 1)]
    what, got = agent.get(1 - rank, b"x" * 20_000, sent)
    assert what == b"x" * 20_000
    assert digest(got) == digest(sent)
    sockets = {thread.name for thread in threading.enumerate()}
    assert "dure-rpc-sockets" in sockets
    closed(agent)


def test_where_no_ring_is_free_messages_go_through_sockets(process_pool, url: str) -> None:
    process_pool(2).run(without_rings, url)


def stopped(rank: int, url: str, shared: bool) -> None:
    agent = echo(url, rank, 2, shared_memory=shared)
    agent.get(1 - rank)
    dure.barrier()
    if rank == 0:
        other = agent.transport.peers.find(1)
        assert other is not None
        os.kill(other.process.pid, signal.SIGSTOP)
        made = [b"%d " % number + b"x" * 1000 for number in range(500)]
        asked = [agent.ask(1, text) for text in made]  # more than a ring holds, and none waits
        os.kill(other.process.pid, signal.SIGCONT)
        assert [agent.answer(each)[0] for each in asked] == made
    closed(agent)


@both
def test_nobody_waits_for_a_receiver(process_pool, url: str, shared: bool) -> None:
    process_pool(2).run(stopped, url, shared)


_agents: list[Echo] = []
"""Of a process of `Ranks`: what one call leaves to the next."""


def take_part(
    _: Slot, url: str, rank: int, world_size: int | None, shared: bool, host: str, name: str
) -> int:
    """Be there from now on; return the id."""
    if host:
        env.put("DURE_HOST_ID", host)
    _agents.append(echo(url, rank, world_size, name=name, shared_memory=shared))
    return _agents[0].me


def join_many(slot: Slot) -> int:
    take_part(slot, slot.url, slot.rank, slot.size, True, "", f"many{slot.rank}")
    return threading.active_count()


def ask_everybody(slot: Slot) -> int:
    agent = _agents[0]
    for _ in range(2):
        asked = [agent.ask(to, b"", [numbered(6000, to)]) for to in range(slot.size)]
        for to, each in enumerate(asked):
            assert digest(agent.answer(each)[1]) == digest([numbered(6000, to)])
    return threading.active_count()


def be_idle(_: Slot) -> float:
    """Return how long this process computes in half a second."""
    busy = time.process_time()
    time.sleep(_IDLE_S)
    return time.process_time() - busy


def leave(_: Slot, known: bool) -> list[int]:
    agent = _agents.pop()
    agent.transport.close(known)
    return agent.broke


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_many_small_workers_ask_each_other_and_cost_nothing_when_idle(
    count: int, tmp_path: Path
) -> None:
    with Ranks(count, tmp_path, join_many) as ranks:
        assert max(ranks.values()) <= 6  # nothing for each that is there
        ranks.start(ask_everybody)
        assert max(ranks.values()) <= 16  # nor for each that was asked
        ranks.start(be_idle)
        assert max(ranks.values()) < _IDLE_S / 2  # a thread that looks all the time needs all of it
        ranks.start(leave, True)
        assert ranks.values() == [[]] * count


# --- who ends -------------------------------------------------------------------------------------


@pytest.fixture
def start_victim(tmp_path: Path, url: str) -> Iterator[Callable[..., Ranks]]:
    """Return a function that starts another process, which takes part until it is killed."""
    with ExitStack() as started:

        def start(
            rank: int, size: int | None, shared: bool = True, host: str = "", name: str = "v"
        ) -> Ranks:
            what = (url, rank, size, shared, host, name)
            return started.enter_context(Ranks(1, tmp_path, take_part, *what))

        yield start


def murder(rank: int, url: str, shared: bool, pid: int) -> str:
    agent = echo(url, rank, 3, shared_memory=shared)
    answered = lost = number = 0
    sent = [numbered(100_000, rank)]
    while lost < 20:
        number += 1
        asked = [agent.ask(2, b"%d" % number, sent) for _ in range(2)]
        if rank == 0 and number == 50:
            os.kill(pid, signal.SIGKILL)
        for each in asked:
            try:
                assert agent.answer(each)[0] == b"%d" % number
                answered += 1
            except PeerLost:
                lost += 1
            except RpcError:
                assert not shared  # its connection breaks first, and it may have run
    how = agent.end_of(2)
    with pytest.raises(PeerLost) as caught:
        agent.transport.send(2, Envelope(Kind.CALL, agent.me), [])
    assert caught.value.peer == 2
    assert agent.get(1 - rank, b"alive", sent)[0] == b"alive"
    dure.barrier()
    agent.transport.close()
    assert rank != 0 or answered >= 50
    return how


@both
def test_a_process_that_is_killed_is_lost_to_all_and_no_call_hangs(
    process_pool, start_victim, url: str, shared: bool
) -> None:
    (pid,) = start_victim(2, 3, shared).pids
    how = "signal 9 (SIGKILL)" if shared else ""
    assert process_pool(2).run(murder, url, shared, pid) == [how, how]


def leaving(rank: int, url: str, shared: bool) -> None:
    agent = echo(url, rank, 2, shared_memory=shared)
    got = list[bytes]()

    def leave(_: int, question: Answer) -> Answer:
        for number in range(300):  # more than a ring holds: some through the other way
            agent.ask(0, b"note %d" % number + b"x" * 1000)
        agent.transport.close()
        return question

    agent.functions[b"leave"] = leave
    agent.functions[b"note"] = lambda _, question: (got.append(question[0]), question)[1]
    if rank == 0:
        asked = agent.ask(1, b"leave")
        assert agent.end_of(1) == "it left"
        assert type(asked.answer) is (RpcError if agent.broke else PeerLost)  # who was first
        with pytest.raises(PeerLost):
            agent.transport.send(1, Envelope(Kind.CALL, agent.me), [])
        until(lambda: len(got) == 300, "what it has sent before")
    dure.barrier()  # until here it lives on
    agent.transport.close()


@both
def test_who_leaves_and_lives_on_is_lost(process_pool, url: str, shared: bool) -> None:
    process_pool(2).run(leaving, url, shared)


def far_away(rank: int, url: str) -> tuple[str, str]:
    agent = echo(url, rank, 3, unreachable_s=3.0)
    sent = [numbered(1 << 20, rank)]
    assert digest(agent.get(1 - rank, b"", sent)[1]) == digest(sent)
    assert digest(agent.get(2, b"", sent)[1]) == digest(sent)
    dure.barrier()
    other = agent.transport.peers.find(2)
    assert other is not None
    if rank == 0:
        os.kill(other.process.pid, signal.SIGKILL)
    how = agent.end_of(2)
    assert agent.get(1 - rank, b"alive")[0] == b"alive"
    closed(agent)
    return how, other.process.host


def test_a_process_of_another_host_that_cannot_be_reached_is_lost(start_victim, url: str) -> None:
    with ProcessPool(2, "gloo", hosts=["here", "there"]) as pool:
        start_victim(2, 3, host="elsewhere")
        assert pool.run(far_away, url) == [("it could not be reached", "elsewhere")] * 2


def relayed(relays: list[Relay]) -> None:
    """Have the others reach this process through a relay."""
    plain = meeting.listen

    class Published(meeting.Peer, frozen=True, array_like=True):
        pass

    def listen(address):
        listener = plain(address)
        relays.append(Relay(listener.port))
        return listener

    def peer(name, rank, process, heap, inbox, endpoint):
        endpoint = f"tcp://127.0.0.1:{relays[0].port}"
        return Published(name, rank, process, heap, inbox, endpoint)

    meeting.listen, meeting.Peer = listen, peer  # pyright: ignore


def cut(rank: int, url: str) -> list[int]:
    relays: list[Relay] = []
    saved = meeting.listen, meeting.Peer
    relayed(relays)
    try:
        agent = echo(url, rank, 2, shared_memory=False)
    finally:
        meeting.listen, meeting.Peer = saved  # pyright: ignore
    held = threading.Event()
    agent.functions[b"hold"] = lambda _, question: (held.wait(PATIENCE_S), question)[1]
    with relays[0]:
        assert agent.get(1 - rank, b"before")[0] == b"before"
        asked = agent.ask(1 - rank, b"hold")
        dure.barrier()
        if rank == 0:
            until(relays[0].cut, "a connection to be cut")
        with pytest.raises(RpcError):  # the other end has lost what it would answer through
            agent.answer(asked)
        held.set()
        dure.barrier()
        data = [numbered(1 << 20, 1)]
        while True:  # a call that is made before the other connection is found broken ends, too
            try:
                assert digest(agent.get(1 - rank, b"after", data)[1]) == digest(data)
                break
            except RpcError:
                continue
        closed(agent)
    return agent.broke


def test_a_connection_that_breaks_is_told_at_both_ends_and_opened_again(
    process_pool, url: str
) -> None:
    first, second = process_pool(2).run(cut, url)
    assert set(first) == {1}
    assert set(second) == {0}


# --- who comes ------------------------------------------------------------------------------------


def test_with_dynamic_membership_processes_come_go_and_come_again(url: str, start_victim) -> None:
    agent = echo(url, 0, None, name="first")
    victim = start_victim(-1, None)
    assert victim.values() == [1]
    until(lambda: agent.transport.peers.named("v"), "the other")
    assert agent.get(1, b"hello", [numbered(5000, 1)])[0] == b"hello"
    with pytest.raises(RendezvousError):
        echo(url, -1, None, name="v")
    os.kill(victim.pids[0], signal.SIGKILL)
    assert agent.end_of(1) == "signal 9 (SIGKILL)"
    again = start_victim(-1, None)  # the same name
    assert again.values() == [2]
    until(lambda: agent.transport.peers.named("v"), "the other to come again")
    assert agent.get(2, b"hello")[0] == b"hello"
    assert agent.names == {0: "first", 1: "v", 2: "v"}
    with pytest.raises(PeerLost):
        agent.get(1)
    again.start(leave, False)
    assert agent.end_of(2) == "it left"
    assert [peer.name for peer in agent.transport.peers.all()] == ["first"]
    agent.transport.close()
