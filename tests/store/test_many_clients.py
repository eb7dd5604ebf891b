"""A large job whose ranks all connect at once: every one of them is served."""

import time

import pytest
import zmq

from dure.store import JobKey, router
from dure.store.server import StoreServer
from dure.store.wire import StoreRequest, pack, read_reply
from tests.waiting import PATIENCE_S

NUM_CLIENTS = 1500


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the last handshake takes longer than one may; a client would try again."""
    monkeypatch.setattr(router, "HANDSHAKE_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")  # before the server
def test_1500_clients_with_the_right_key_connect_at_once(server: StoreServer, key: JobKey) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, NUM_CLIENTS + 16)
    clients = [context.socket(zmq.DEALER) for _ in range(NUM_CLIENTS)]
    try:
        for client in clients:
            client.linger = 0
            client.reconnect_ivl = -1  # a client that is refused must not come back unnoticed
            key.arm(client, "store client")
            client.curve_serverkey = key.pair("store server").public
            client.connect(server.endpoint)
            client.send(pack(StoreRequest("add", ("connected",), amount=1)))
        deadline = time.monotonic() + PATIENCE_S
        unanswered = [
            number
            for number, client in enumerate(clients)
            if not client.poll(max(0, int(1000 * (deadline - time.monotonic()))))
        ]
        assert unanswered == []
        sums = [read_reply(client.recv()).number for client in clients]
        assert sorted(sums) == list(range(1, NUM_CLIENTS + 1))
    finally:
        context.destroy(linger=0)
