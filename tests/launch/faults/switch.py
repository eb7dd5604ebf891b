"""A network switch whose wires can be spoilt: a program, for a network namespace of its own.

    switch.py serve p0 p1 ...      pass frames between the ports, as standard input says
    switch.py plain eth0           let a host's interface send frames as they are on a wire

Frames go to the port behind which their receiver was seen, or to all. Lines of standard input, each
answered by "ok":

    drop FROM TO     nothing from one port reaches the other any more (one direction)
    loss PERCENT     so many frames are lost, by a fixed random sequence
    delay SECONDS    each frame arrives so much later, in order
    clear            the network is whole

For kernels without `netem`; it needs root. Frames with checksums or segments that a network card
would have to complete cannot pass a program, so hosts must not make them (`plain`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import random
import select
import socket
import struct
import sys
import time

_ETH_P_ALL = 3
_LARGEST = 1 << 16
_SIOCETHTOOL = 0x8946
_OFF = (0x17, 0x1F, 0x24)
"""ETHTOOL_STXCSUM, _STSO and _SGSO: checksums and segments that the interface would make."""


class Switch:
    """The ports, who is behind which, and what is wrong with the wires."""

    def __init__(self, ports: list[str]) -> None:
        self._ports = [_open(port) for port in ports]
        self._behind: dict[bytes, int] = {}
        self._random = random.Random(1)
        self._late: list[tuple[float, int, int, bytes]] = []
        self._sent = 0
        self._dropped: set[tuple[int, int]] = set()
        self._loss = self._delay_s = 0.0

    def serve(self) -> None:
        """Pass frames until standard input ends."""
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            ready, _, _ = select.select([*self._ports, sys.stdin], [], [], wait_s)
            for source, port in enumerate(self._ports):
                if port in ready:
                    self._take(source)
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self._late)
                self._send(target, frame)
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                self._obey(*line.split())
                print("ok", flush=True)

    def _obey(self, what: str, *words: str) -> None:
        match what:
            case "drop":
                self._dropped.add((int(words[0]), int(words[1])))
            case "loss":
                self._loss = float(words[0]) / 100
            case "delay":
                self._delay_s = float(words[0])
            case _:
                self._dropped.clear()
                self._loss = self._delay_s = 0.0

    def _take(self, source: int) -> None:
        """Pass on the frames that wait at a port."""
        for _ in range(64):
            try:
                frame, address = self._ports[source].recvfrom(_LARGEST)
            except BlockingIOError:
                return
            if address[2] == socket.PACKET_OUTGOING:
                continue
            self._behind[frame[6:12]] = source
            known = self._behind.get(frame[:6])
            targets = range(len(self._ports)) if known is None else [known]
            for target in targets:
                if target != source and (source, target) not in self._dropped:
                    self._pass(target, frame)

    def _pass(self, target: int, frame: bytes) -> None:
        if self._random.random() < self._loss:
            return
        if not self._delay_s:
            self._send(target, frame)
            return
        self._sent += 1
        heapq.heappush(self._late, (time.monotonic() + self._delay_s, self._sent, target, frame))

    def _send(self, target: int, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # a full queue loses frames, as everywhere
            self._ports[target].send(frame)


def _open(port: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    opened.bind((port, 0))
    opened.setblocking(False)
    return opened


def plain(interface: str) -> None:
    """Let an interface complete its frames before it sends them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in _OFF:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):  # what it never had
                fcntl.ioctl(any_socket, _SIOCETHTOOL, request)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        Switch(sys.argv[2:]).serve()
    else:
        plain(sys.argv[2])
