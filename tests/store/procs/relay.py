"""A relay between clients and a server: records, loses, adds and cuts what passes."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading


class Relay:
    """Takes connections on a port of its own, `port`, and passes on what they carry.

    Args:
        port: The server's.
        lose: Which packet of a connection to its client is lost, and the connection with it.
        source: The address of this host from which the server is reached; "": any.

    Attributes:
        recorded: All that clients have sent.
        server: The end of the last connection at which the server is.
        server_hung_up: Set when the server has ended a connection.
    """

    def __init__(self, port: int, lose: int = 0, source: str = "") -> None:
        self._lose, self.lost = lose, 0
        self.recorded = b""
        self.server_hung_up = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self._target = self._listener.getsockname()[1], port
        self._source = (source, 0)
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                there = ("127.0.0.1", self._target)
                self.server = far = socket.create_connection(there, source_address=self._source)
                self._ends += [near, far]
                for pump in (self._pump_to_server, self._pump_to_client):
                    self._threads.append(threading.Thread(target=pump, args=(near, far)))
                    self._threads[-1].start()

    def _pump_to_server(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(65536):
                self.recorded += data
                far.sendall(data)
        _shut_down(near, far)

    def _pump_to_client(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count(1):
                data = far.recv(65536)
                if not data or number == self._lose:
                    self.lost += bool(data)
                    break
                near.sendall(data)
        self.server_hung_up.set()
        _shut_down(near, far)

    def cut(self) -> int:
        """Send an RST on all connections; return how many ends they had."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
            end.close()
        return len(ends)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()


def _shut_down(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
