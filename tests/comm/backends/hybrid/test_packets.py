"""A listener that has heard enough: the kernel answers nobody any more."""

import contextlib
import socket

import zmq

from dure.comm.backends.hybrid.packets import refuse_new_connections
from dure.store.address import resolve
from dure.store.listener import listen


def answers(place: tuple[str, int]) -> bool:
    with contextlib.suppress(TimeoutError), socket.create_connection(place, timeout=0.2):
        return True
    return False


def test_zeromq_goes_on_with_a_listener_that_is_deaf() -> None:
    with zmq.Context() as context:
        place = listen(resolve("127.0.0.1", 0))
        server, client = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        server.use_fd = place.fd
        server.bind(place.endpoint)
        client.connect(place.endpoint)
        client.send(b"first")
        assert server.recv() == b"first"
        with socket.socket(fileno=socket.dup(place.fd)) as listener:
            refuse_new_connections(listener)
        assert not answers(("127.0.0.1", place.port))
        client.send(b"second")
        assert server.recv() == b"second"
        server.send(b"third")
        assert client.recv() == b"third"
        server.close(0)
        client.close(0)
