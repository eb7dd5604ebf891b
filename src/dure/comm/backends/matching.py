"""Which message goes to which receive, in a backend whose messages do not match themselves.

A receive takes the first message that meets it (its sender and its tag), and a message goes to the
first receive that meets it. A receive whose length or dtype differs from its message is refused;
the message is kept for one that fits. The native engine has the same rule (csrc/core/matching.cpp).

Threads: one at a time.
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
        meets: Whether a receive asks for a message.
        fits: Whether it has room for exactly that message.
        refuse: Fails a receive whose message does not fit.

    Attributes:
        receives: Those that wait, in the order in which they were posted.
        messages: Those that wait, in the order in which they arrived.
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
        """Return the message of a receive, which waits no longer; else let the receive wait."""
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
        """Return the receive of a message, which waits no longer; else let the message wait."""
        for receive in [r for r in self.receives if self._meets(r, message)]:
            self.receives.remove(receive)
            if self._fits(receive, message):
                return receive
            self._refuse(receive, message)
        self.messages.append(message)
        return None
