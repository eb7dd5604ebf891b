"""Ranks that look why they are not connected, with ports that drop connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from dure.comm.backends import reachability
from dure.store import HashStore
from tests.comm.options import options
from tests.waiting import PATIENCE_S

ANSWER_S = 0.3


@pytest.fixture
def dropping() -> Iterator[list[int]]:
    """Ports whose queue of connections is full: the kernel drops further ones."""
    with ExitStack() as undo:
        ports: list[int] = []
        for _ in range(8):
            listener = undo.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(3):
                client = undo.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(listener.getsockname())
            ports.append(listener.getsockname()[1])
        yield ports


def test_ports_that_drop_connections_are_tried_at_once(
    dropping: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reachability, "_ANSWER_S", ANSWER_S)
    monkeypatch.setattr(reachability, "_LIMIT_S", 2 * ANSWER_S)
    at_once, tried = threading.Barrier(len(dropping) + 1), reachability._why_unreachable

    def try_with_all_others(port: Any) -> str:
        at_once.wait(PATIENCE_S)
        return tried(port)

    monkeypatch.setattr(reachability, "_why_unreachable", try_with_all_others)
    store, size = HashStore(), len(dropping) + 2
    with socket.create_server(("127.0.0.1", 0)) as last:
        for rank, port in enumerate([*dropping, last.getsockname()[1]], start=1):
            said = ("elsewhere", "127.0.0.1", port)
            store.set(f"reachability/port/{rank}", msgspec.msgpack.encode(said))
        found = reachability.find_unconnected(options(0, size, store), "127.0.0.1")
    assert [each.rank for each in found.unreachable] == [*range(1, 9)]
    assert {each.why for each in found.unreachable} == {"no answer"}
    assert not found.absent
