"""Messages that must arrive: numbered, acknowledged, sent again on a new connection.

Calls are sent at most once. Messages about references and gradients must arrive, once and in their
order, as long as both processes live, whatever happens to connections. A `Link` is one process's
end of that, without I/O: the sender numbers its messages and keeps each until the receiver has said
that it has all up to that number; when a connection breaks, what is kept is sent again. The
receiver delivers in the order of the numbers and drops what it has had; messages may come through a
ring of shared memory and through a socket in turns, and so in another order.
"""

from __future__ import annotations

import msgspec

__all__ = ["Link", "Numbered"]


class Numbered(msgspec.Struct, array_like=True, frozen=True):
    """A message on its way. Number 0 carries nothing but the acknowledgement."""

    number: int
    received: int  # the sender has had all messages of the other direction up to this one
    body: bytes = b""


class Link:
    """One end of the messages between two processes; the caller's lock guards it."""

    def __init__(self) -> None:
        self.sent = self.received = 0  # the numbers of the last messages, of each direction
        self.kept: dict[int, bytes] = {}  # sent, and not acknowledged
        self._early: dict[int, bytes] = {}
        self.acknowledged = 0  # the last received message of which the other end knows

    def send(self, body: bytes) -> Numbered:
        """Return what to send for a message."""
        self.sent += 1
        self.kept[self.sent] = body
        return self._message(self.sent, body)

    def acknowledge(self) -> Numbered:
        """Return a message that only acknowledges."""
        return self._message(0, b"")

    def again(self) -> list[Numbered]:
        """Return what to send on a new connection."""
        return [self._message(number, body) for number, body in self.kept.items()]

    def receive(self, message: Numbered) -> list[bytes]:
        """Return the messages that can be delivered now, in order."""
        for number in [number for number in self.kept if number <= message.received]:
            del self.kept[number]
        if message.number > self.received:
            self._early[message.number] = message.body
        elif message.number > 0:
            self.acknowledged = min(self.acknowledged, message.number - 1)  # sent again
        due: list[bytes] = []
        while self.received + 1 in self._early:
            self.received += 1
            due.append(self._early.pop(self.received))
        return due

    def _message(self, number: int, body: bytes) -> Numbered:
        self.acknowledged = self.received
        return Numbered(number, self.received, body)
