"""Messages between real processes: through shared memory, through sockets, and when some end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq

import dure
from dure import env, native
from dure.errors import PeerLost, RendezvousError, RpcError
from dure.rpc import meeting
from dure.rpc.envelope import Envelope, Kind
from dure.store.key import JobKey, mint
from dure.store.tracker import read_event
from dure.testing import ProcessPool
from dure.testing.pool import start_server
from procs.relay import Relay
from procs.rpc_echo import Answer, Echo, digest, echo, numbered
from waiting import until

pytestmark = pytest.mark.skipif(not native.available()[0], reason="needs the native engine")

both = pytest.mark.parametrize("shared", [True, False], ids=["memory", "sockets"])

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


def stream(rank: int, url: str, shared: bool, count: int) -> float:
    agent = echo(url, rank, 2, shared_memory=shared)
    agent.functions[b"sum"] = lambda _, question: (digest(question[1]), [])
    most = 0.0
    if rank == 0:
        data = [numbered(8 << 20, number) for number in range(2)]
        digests = [digest([each]) for each in data]
        before, under_way = psutil.Process().memory_info().rss, list[object]()
        for number in range(count):
            asked = agent.ask(1, b"sum", [data[number % 2]])
            under_way.append((asked, digests[number % 2]))
            if len(under_way) == 4:
                asked, expected = under_way.pop(0)  # pyright: ignore[reportGeneralTypeIssues]
                assert agent.answer(asked)[0] == expected
            if number % 8 == 0:
                used = native.heap_usage()[0]
                most = max(most, psutil.Process().memory_info().rss - before, used)
        for asked, expected in under_way:  # pyright: ignore[reportGeneralTypeIssues]
            assert agent.answer(asked)[0] == expected
    closed(agent)
    return most


@both
def test_a_gigabyte_goes_through_little_memory(process_pool, url: str, shared: bool) -> None:
    most = process_pool(2).run(stream, url, shared, 128, timeout=120)[0]
    assert most < 300e6


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


def one_of_many(url: str, rank: int, world_size: int, pipe: Connection) -> None:
    """Ask everybody, be idle, and leave; the pipe says when."""
    torch.set_num_threads(1)
    agent = echo(url, rank, world_size)
    before = threading.active_count()
    pipe.send(pipe.recv())  # all are there
    for _ in range(2):
        asked = [agent.ask(to, b"%d" % to, [numbered(6000, to)]) for to in range(world_size)]
        for to, each in enumerate(asked):
            assert agent.transport.wait(each.ticket, 90.0)
            assert isinstance(each.answer, tuple)
            assert digest(each.answer[1]) == digest([numbered(6000, to)])
    threads = threading.active_count()
    pipe.send((before, threads))
    pipe.recv()  # all have asked
    busy = time.process_time()
    assert not pipe.poll(2.0)
    pipe.send(time.process_time() - busy)
    pipe.recv()  # all have been idle
    agent.transport.close(known=True)
    pipe.send(agent.broke)


@pytest.mark.parametrize(
    "count", [6, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(240)])]
)
def test_many_small_workers_ask_each_other_and_cost_nothing_when_idle(url: str, count: int) -> None:
    context, pipes, started = start_server(), list[Connection](), list[Any]()
    for rank in range(count):
        pipe, theirs = context.Pipe()
        process = context.Process(
            target=one_of_many, args=(url, rank, count, theirs), name=f"many-{rank}", daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(pipe)
        started.append(process)

    def all_together(word: str) -> list[Any]:
        for pipe in pipes:
            pipe.send(word)
        return [pipe.recv() for pipe in pipes]

    assert all_together("there") == ["there"] * count
    counts = [pipe.recv() for pipe in pipes]
    assert max(before for before, _ in counts) <= 6  # nothing for each that is there
    assert max(threads for _, threads in counts) <= 16  # nor for each that was asked
    assert max(all_together("idle")) < 0.1
    assert all_together("leave") == [[]] * count
    for process in started:
        process.join()
        assert process.exitcode == 0
        process.close()
    for pipe in pipes:
        pipe.close()


# --- who ends -------------------------------------------------------------------------------------


def victim(url: str, rank: int, world_size: int | None, host: str, pipe: Connection) -> None:
    """Take part until the pipe closes."""
    torch.set_num_threads(1)
    if host:
        env.put("DURE_HOST_ID", host)
    shared, name = pipe.recv()
    agent = echo(url, rank, world_size, name=name, shared_memory=shared)
    pipe.send(agent.me)
    try:
        pipe.recv()
    except EOFError:
        return
    agent.transport.close()


@pytest.fixture
def start_victim() -> Iterator[Callable[..., tuple[int, Connection]]]:
    """Return a function that starts another process; it returns its pid and a pipe to it."""
    context, started = start_server(), list[object]()

    def start(
        url: str, rank: int, size: int | None, shared: bool = True, host: str = "", name: str = "v"
    ) -> tuple[int, Connection]:
        pipe, theirs = context.Pipe()
        process = context.Process(target=victim, args=(url, rank, size, host, theirs), daemon=True)
        process.start()
        theirs.close()
        pipe.send((shared, name))
        started.append((process, pipe))
        assert process.pid is not None
        return process.pid, pipe

    yield start
    for process, pipe in started:  # pyright: ignore[reportGeneralTypeIssues]
        pipe.close()
        process.kill()
        process.join()
        process.close()


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
    pid, _ = start_victim(url, 2, 3, shared)
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
        with pytest.raises((PeerLost, RpcError)):  # its connection may break first
            agent.get(1, b"leave")
        assert agent.end_of(1) == "it left"
        with pytest.raises(PeerLost):
            agent.transport.send(1, Envelope(Kind.CALL, agent.me), [])
        until(lambda: len(got) == 300, "what it has sent before")
    dure.barrier()  # until here it lives on
    agent.transport.close()


@both
def test_who_leaves_and_lives_on_is_lost(process_pool, url: str, shared: bool) -> None:
    process_pool(2).run(leaving, url, shared)


def far_away(rank: int, url: str) -> tuple[str, str]:
    agent = echo(url, rank, 3, unreachable_s=1.0)
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
        start_victim(url, 2, 3, host="elsewhere")
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
    agent.functions[b"hold"] = lambda _, question: (held.wait(20), question)[1]
    with relays[0]:
        assert agent.get(1 - rank, b"before")[0] == b"before"
        asked = agent.ask(1 - rank, b"hold")
        dure.barrier()
        if rank == 0:
            while not relays[0].cut():
                pass
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


def test_who_has_another_key_is_refused(url: str, start_victim) -> None:
    pid, pipe = start_victim(url, 1, 2, False)
    agent = echo(url, 0, 2, shared_memory=False)
    other = agent.transport.peers.find(1)
    assert other is not None
    assert other.process.pid == pid
    assert is_refused(other.endpoint, mint())
    assert is_refused(other.endpoint, None)
    assert agent.get(1, b"still there")[0] == b"still there"
    pipe.send("end")
    agent.transport.close()


def is_refused(endpoint: str, key: JobKey | None) -> bool:
    """Tell whether the handshake of somebody who has this key fails."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger, stranger.reconnect_ivl = 0, -1
        if key is not None:
            key.arm(stranger, "rpc client")
            stranger.curve_serverkey = key.pair("rpc server").public
        stranger.monitor("inproc://stranger", zmq.EVENT_ALL)
        with context.socket(zmq.PAIR) as monitor:
            monitor.linger = 0
            monitor.connect("inproc://stranger")
            stranger.connect(endpoint)
            while monitor.poll(20_000):
                event, _ = read_event(monitor)
                if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                    return False
                if event in (zmq.Event.DISCONNECTED, zmq.Event.CLOSED):
                    return True
    return False


# --- who comes ------------------------------------------------------------------------------------


def wait_for(agent: Echo, name: str) -> int:
    deadline = time.monotonic() + 20
    while (found := agent.transport.peers.named(name)) is None:
        assert time.monotonic() < deadline
    return found.id


def test_with_dynamic_membership_processes_come_go_and_come_again(url: str, start_victim) -> None:
    agent = echo(url, 0, None, name="first")
    pid, pipe = start_victim(url, -1, None)
    assert pipe.recv() == 1
    assert wait_for(agent, "v") == 1
    assert agent.get(1, b"hello", [numbered(5000, 1)])[0] == b"hello"
    with pytest.raises(RendezvousError):
        echo(url, -1, None, name="v")
    os.kill(pid, signal.SIGKILL)
    assert agent.end_of(1) == "signal 9 (SIGKILL)"
    _, pipe = start_victim(url, -1, None)  # the same name
    assert pipe.recv() == 2
    assert wait_for(agent, "v") == 2
    assert agent.get(2, b"hello")[0] == b"hello"
    assert agent.names == {0: "first", 1: "v", 2: "v"}
    with pytest.raises(PeerLost):
        agent.get(1)
    pipe.send("leave")
    assert agent.end_of(2) in ("it left", "exit code 0")  # the log or the kernel, who is first
    assert [peer.name for peer in agent.transport.peers.all()] == ["first"]
    agent.transport.close()
