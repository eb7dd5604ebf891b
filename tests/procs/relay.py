"""A relay between clients and a server, which resets their connections when told."""

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
    """

    def __init__(self, port: int, lose: int = 0) -> None:
        self._lose, self.lost = lose, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self._target = self._listener.getsockname()[1], port
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for way in ((near, far, 0), (far, near, self._lose)):
                    self._threads.append(threading.Thread(target=self._pump, args=way))
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, lose: int) -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count(1):
                data = source.recv(65536)
                if not data or number == lose:
                    self.lost += bool(data)
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

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
        self._threads[0].join(5)
        self.cut()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()
