"""Messages in order: numbered by the sender, delivered in the order of the numbers.

Messages about references and contexts must arrive in order. They may go through a ring of shared
memory and through a socket, and so arrive in another order.
"""

from __future__ import annotations

import msgspec

__all__ = ["Numbered", "OrderedLink"]


class Numbered(msgspec.Struct, array_like=True, frozen=True):
    """A message under way."""

    number: int
    body: bytes


class OrderedLink:
    """One end of the numbered messages between two processes; the caller's lock guards it.

    Attributes:
        sent: The number of the last message that was sent.
        received: The number of the last message that was delivered.
    """

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._early: dict[int, bytes] = {}

    def send(self, body: bytes) -> Numbered:
        """Number a message, and return it."""
        self.sent += 1
        return Numbered(self.sent, body)

    def receive(self, message: Numbered) -> list[bytes]:
        """Return the messages that can be delivered now, in order."""
        self._early[message.number] = message.body
        due: list[bytes] = []
        while self.received + 1 in self._early:
            self.received += 1
            due.append(self._early.pop(self.received))
        return due
