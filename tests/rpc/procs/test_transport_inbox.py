"""Messages between processes of a host: none is lost or doubled, whichever thread asks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dure import native
from tests.comm.forked_ranks import Ranks, Slot
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("engine")


def address_of(inbox: native.Inbox) -> tuple[int, int, int, int]:
    return (*native.heap_identity(), inbox.offset)


def outbox_of(address: tuple[int, int, int, int]) -> native.Outbox:
    peer = native.heap_peer(*address[:3])
    assert peer is not None
    outbox = native.Outbox.claim(peer, address[3])
    assert outbox is not None
    return outbox


def test_a_ticket_calls_its_thread_away_and_others_get_what_is_posted() -> None:
    inbox, ticket = native.Inbox(), native.Ticket()
    found: list[object] = []
    waits = threading.Thread(target=lambda: found.append(inbox.next(ticket, PATIENCE_S)))
    serves = threading.Thread(target=lambda: found.append(inbox.next(None, PATIENCE_S)))
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


kept: list[object] = []
"""Of a process of `Ranks`: what it has until it ends."""


def claim_all(_: Slot, address: tuple[int, int, int, int]) -> list[bool]:
    peer = native.heap_peer(*address[:3])
    assert peer is not None
    outboxes = [native.Outbox.claim(peer, address[3]) for _ in range(17)]
    assert outboxes[0] is not None
    outboxes[0].send(b"last words")
    kept.extend(outboxes)
    return [outbox is not None for outbox in outboxes]


def test_the_rings_of_a_process_that_ended_are_free_when_they_have_been_read(
    tmp_path: Path,
) -> None:
    inbox = native.Inbox()
    with Ranks(1, tmp_path, claim_all, address_of(inbox)) as process:
        assert process.values() == [[True] * 16 + [False]]
        (pid,) = process.pids
    assert not inbox.forget(pid)
    assert inbox.next(None, 0.0) == b"last words"
    assert inbox.forget(pid)
    with Ranks(1, tmp_path, claim_all, address_of(inbox)) as process:
        assert process.values() == [[True] * 16 + [False]]


def test_what_does_not_fit_is_refused() -> None:
    inbox = native.Inbox()
    outbox = outbox_of(address_of(inbox))
    assert not outbox.send(b"x" * (16 * 1024 + 1))
    sent = 0
    while outbox.send(b"y" * 16 * 1024):
        sent += 1
    assert sent == 3  # of four that 64 KiB would hold without their lengths
    assert inbox.next(None, 0.0) == b"y" * 16 * 1024
    assert outbox.send(b"z" * 16 * 1024)


def identity(_: Slot) -> tuple[int, int, int]:
    return native.heap_identity()


def take_memory(_: Slot, source: tuple[int, int, int], offset: int) -> bytes:
    peer = native.heap_peer(*source)
    assert peer is not None
    kept.append(native.heap_take(peer, offset, 8192))
    return bytes(memoryview(kept[-1])[:5])  # pyright: ignore[reportArgumentType]


def let_go(_: Slot) -> None:
    kept.clear()


def test_memory_that_is_given_is_the_receivers_until_it_lets_go(tmp_path: Path) -> None:
    with Ranks(1, tmp_path, identity) as process:
        peer = native.heap_peer(*process.values()[0])
        assert peer is not None
        given = native.heap_give(8192, peer)
        assert given is not None
        memoryview(given)[:5] = b"hello"
        used = native.heap_usage()[0]
        process.start(take_memory, native.heap_identity(), given.offset)
        del given
        assert process.values() == [b"hello"]
        assert native.heap_usage()[0] == used
        process.start(let_go)
        assert process.values() == [None]
        native.heap_allocate(1, False)  # which looks for what is free
        assert native.heap_usage()[0] < used
