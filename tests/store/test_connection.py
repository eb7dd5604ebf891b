"""One connection to a server: nobody is there, somebody who says nothing, one who has just gone."""

import socket
from datetime import timedelta

import pytest
import zmq

from dure.errors import StoreTimeout
from dure.store import JobKey, connection, router
from dure.store.connection import Connection, dial
from dure.store.network import NetworkStore


def test_nobody_there_is_a_timeout_that_names_the_address(
    key: JobKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "why_unreachable", lambda endpoint: "no network")
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StoreTimeout) as caught:
            NetworkStore(f"tcp://{place}", key, timedelta(milliseconds=100))
        with pytest.raises(StoreTimeout):  # at once
            NetworkStore(f"tcp://{place}", key, timedelta(hours=1), patience_s=3600.0)
        taken.listen()  # and says nothing
        with pytest.raises(StoreTimeout):
            NetworkStore(f"tcp://{place}", key, timedelta(milliseconds=100))
    assert place in caught.value.what
    assert caught.value.seen == "no network"


def test_a_server_that_says_nothing_is_tried_again_before_it_would_hang_up(monkeypatch) -> None:
    """A busy server ends handshakes itself at last, which must not be taken for a refusal."""
    assert connection._ATTEMPT_S < router.HANDSHAKE_S
    monkeypatch.setattr(connection, "_ATTEMPT_S", 0.02)
    with zmq.Context() as context, socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreTimeout):
            dial(lambda: Connection(context, endpoint, None), endpoint, None, 0.5, 0.0)
        silent.setblocking(False)
        for _ in range(2):
            silent.accept()[0].close()
