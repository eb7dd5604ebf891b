"""Messages between processes of a host: none is lost or doubled, whichever thread asks."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from multiprocessing.connection import Connection

import pytest

from dure import native

pytestmark = pytest.mark.skipif(not native.available()[0], reason="needs the native engine")


def outbox_of(address: tuple[int, int, int, int]) -> native.Outbox:
    peer = native.heap_peer(*address[:3])
    assert peer is not None
    outbox = native.Outbox.claim(peer, address[3])
    assert outbox is not None
    return outbox


def send_many(address: tuple[int, int, int, int], name: int, count: int) -> None:
    outbox = outbox_of(address)
    for number in range(count):
        message = b"%d %d " % (name, number) + b"x" * (number * 37 % 5000)
        while not outbox.send(message):
            pass


def test_many_senders_and_many_receivers() -> None:
    inbox = native.Inbox()
    address = (*native.heap_identity(), inbox.offset)
    context = multiprocessing.get_context("fork")
    senders = [context.Process(target=send_many, args=(address, name, 800)) for name in range(3)]
    got: list[bytes] = []

    def receive() -> None:
        while isinstance(message := inbox.next(None, 30.0), bytes):
            got.append(message)
            if len(got) == 3 * 800:
                inbox.close()

    threads = [threading.Thread(target=receive) for _ in range(3)]
    for each in [*threads, *senders]:
        each.start()
    for each in [*senders, *threads]:
        each.join()
    counted = Counter(tuple(map(int, message.split()[:2])) for message in got)
    assert counted == Counter((name, number) for name in range(3) for number in range(800))
    assert all(len(m.split()[-1]) == int(m.split()[1]) * 37 % 5000 for m in got if b"x" in m)
    assert inbox.next(None, 0.0) is False


def test_a_ticket_calls_its_thread_away_and_others_get_what_is_posted() -> None:
    inbox, ticket = native.Inbox(), native.Ticket()
    found: list[object] = []
    waits = threading.Thread(target=lambda: found.append(inbox.next(ticket, 30.0)))
    serves = threading.Thread(target=lambda: found.append(inbox.next(None, 30.0)))
    waits.start()
    inbox.post(b"for anybody without a ticket")
    serves.start()
    serves.join()
    assert found == [b"for anybody without a ticket"]
    inbox.complete(ticket)
    waits.join()
    assert found[1:] == [True]
    assert ticket.done
    assert inbox.next(ticket, 0.0) is True


def claim_all(address: tuple[int, int, int, int], pipe: Connection) -> None:
    peer = native.heap_peer(*address[:3])
    assert peer is not None
    outboxes = [native.Outbox.claim(peer, address[3]) for _ in range(17)]
    assert outboxes[0] is not None
    outboxes[0].send(b"last words")
    pipe.send([outbox is not None for outbox in outboxes])
    pipe.recv()


def test_the_rings_of_a_process_that_ended_are_free_when_they_have_been_read() -> None:
    inbox = native.Inbox()
    address = (*native.heap_identity(), inbox.offset)
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    process = context.Process(target=claim_all, args=(address, theirs))
    process.start()
    assert pipe.recv() == [True] * 16 + [False]
    process.kill()
    process.join()
    assert process.pid is not None
    assert not inbox.forget(process.pid)
    assert inbox.next(None, 0.0) == b"last words"
    assert inbox.forget(process.pid)
    pipe, theirs = context.Pipe()
    again = context.Process(target=claim_all, args=(address, theirs))
    again.start()
    assert pipe.recv() == [True] * 16 + [False]
    pipe.send(None)
    again.join()


def test_what_does_not_fit_is_refused() -> None:
    inbox = native.Inbox()
    outbox = outbox_of((*native.heap_identity(), inbox.offset))
    assert not outbox.send(b"x" * (16 * 1024 + 1))
    sent = 0
    while outbox.send(b"y" * 16 * 1024):
        sent += 1
    assert sent == 3  # of four that 64 KiB would hold without their lengths
    assert inbox.next(None, 0.0) == b"y" * 16 * 1024
    assert outbox.send(b"z" * 16 * 1024)


def test_memory_that_is_given_is_the_receivers_until_it_lets_go() -> None:
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()

    def hold(connection: Connection) -> None:
        connection.send(native.heap_identity())
        source, offset = connection.recv()
        peer = native.heap_peer(*source)
        assert peer is not None
        memory = native.heap_take(peer, offset, 8192)
        connection.send(bytes(memoryview(memory)[:5]))
        connection.recv()
        del memory
        connection.send("let go")
        connection.recv()

    process = context.Process(target=hold, args=(theirs,))
    process.start()
    peer = native.heap_peer(*pipe.recv())
    assert peer is not None
    given = native.heap_give(8192, peer)
    assert given is not None
    memoryview(given)[:5] = b"hello"
    pipe.send((native.heap_identity(), given.offset))
    used = native.heap_usage()[0]
    del given
    assert pipe.recv() == b"hello"
    assert native.heap_usage()[0] == used
    pipe.send(None)
    assert pipe.recv() == "let go"
    native.heap_allocate(1, False)  # which looks for what is free
    assert native.heap_usage()[0] < used
    pipe.send(None)
    process.join()
