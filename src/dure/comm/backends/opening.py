"""Backends that come about in one exchange: what each rank offers, and what all offers make.

The ranks of a group exchange what they think the group is, once, through the store. A backend whose
ranks have to tell each other something before they can talk may put it into that exchange: its
`Opening` says what this rank *offers*, *connects* with what the others offer, and is *complete*
when all have connected. So any number of groups costs one exchange. Nothing waits before
`complete`; several groups are first all connected and then all completed, in the same order on
every rank.

Other backends are made by their factory, in `complete`, and find each other through the group's
store by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dure.comm.backends.base import Backend, BackendFactory, BackendOptions

__all__ = ["FactoryOpening", "Opening"]


class Opening(Protocol):
    """This rank's part of a backend that is coming about."""

    @property
    def offer(self) -> bytes:
        """What the other ranks have to know."""
        ...

    def connect(self, offers: Sequence[bytes]) -> None:
        """Connect to the others, who offer `offers`, by group rank; do not wait for them."""
        ...

    def complete(self) -> Backend:
        """Return the backend when all ranks have connected."""
        ...

    def withdraw(self) -> None:
        """Let go of what was made; safe to call at any time, also twice."""
        ...


class FactoryOpening:
    """The opening of a backend that its factory makes whole."""

    offer = b""

    def __init__(self, factory: BackendFactory, options: BackendOptions) -> None:
        self._factory, self._options = factory, options

    def connect(self, offers: Sequence[bytes]) -> None:
        """See `Opening.connect`."""

    def complete(self) -> Backend:
        """See `Opening.complete`."""
        return self._factory(self._options)

    def withdraw(self) -> None:
        """See `Opening.withdraw`."""
