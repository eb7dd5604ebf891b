"""Reliable messages: numbered, acknowledged, and resent on a new connection.

Calls are sent at most once. Messages about references and contexts must arrive once, in order, as
long as both processes live, even if connections break. A `ReliableLink` is one process's end of
that, without I/O. The sender numbers its messages and keeps each until the receiver has
acknowledged all up to that number; when a connection breaks, the kept messages are resent. The
receiver delivers messages in the order of their numbers and drops duplicates: messages may go
through a ring of shared memory and through a socket, and so arrive in another order.
"""

from __future__ import annotations

import msgspec

__all__ = ["Numbered", "ReliableLink"]


class Numbered(msgspec.Struct, array_like=True, frozen=True):
    """A message under way. Number 0 is only an acknowledgement."""

    number: int
    received: int  # the sender has received all messages of the other direction up to this
    body: bytes = b""


class ReliableLink:
    """One end of the reliable messages between two processes; the caller's lock guards it."""

    def __init__(self) -> None:
        self.sent = self.received = 0  # the numbers of the last messages, of each direction
        self.kept: dict[int, bytes] = {}  # sent and not acknowledged
        self._early: dict[int, bytes] = {}
        self.acknowledged = 0  # the last received message that the other end knows to have arrived

    def send(self, body: bytes) -> Numbered:
        """Number a message, and return it."""
        self.sent += 1
        self.kept[self.sent] = body
        return self._message(self.sent, body)

    def acknowledge(self) -> Numbered:
        """Return a message that only acknowledges."""
        return self._message(0, b"")

    def again(self) -> list[Numbered]:
        """Return the messages to resend on a new connection."""
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
