"""Matching of messages and receives, for backends that do it in Python.

A receive takes the first message with its sender and tag, and a message is given to the first
receive that matches. A receive whose length or dtype differs from its message fails; the message is
kept for a receive that fits. The native engine has the same rule (csrc/core/matching.cpp).

Threads:
    One at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Matching"]

Receive = TypeVar("Receive")
Message = TypeVar("Message")


class Matching(Generic[Receive, Message]):
    """Messages that wait for their receives, and receives that wait for their messages.

    Args:
        meets: Whether a receive has the sender and tag of a message.
        fits: Whether it has room for exactly that message.
        refuse: Fails a receive whose message does not fit.

    Attributes:
        receives: Pending receives, in the order in which they were posted.
        messages: Pending messages, in the order in which they arrived.
    """

    def __init__(
        self,
        meets: Callable[[Receive, Message], bool],
        fits: Callable[[Receive, Message], bool],
        refuse: Callable[[Receive, Message], None],
    ) -> None:
        self._meets, self._fits, self._refuse = meets, fits, refuse
        self.receives: list[Receive] = []
        self.messages: list[Message] = []

    def message_for(self, receive: Receive) -> Message | None:
        """Return the message that a receive would take."""
        return next((m for m in self.messages if self._meets(receive, m)), None)

    def post(self, receive: Receive) -> Message | None:
        """Remove and return the message of a receive; if there is none, keep the receive."""
        message = self.message_for(receive)
        if message is None:
            self.receives.append(receive)
        elif self._fits(receive, message):
            self.messages.remove(message)
            return message
        else:
            self._refuse(receive, message)
        return None

    def arrive(self, message: Message) -> Receive | None:
        """Remove and return the receive of a message; if there is none, keep the message."""
        for receive in [r for r in self.receives if self._meets(r, message)]:
            self.receives.remove(receive)
            if self._fits(receive, message):
                return receive
            self._refuse(receive, message)
        self.messages.append(message)
        return None
