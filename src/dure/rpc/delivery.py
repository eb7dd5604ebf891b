"""What must arrive at other processes: it rides along with messages, or goes by itself.

References, and what distributed autograd tells, are numbered by a link a peer (`links`) and sent
again on a new connection. What is in no hurry waits a little for a message to ride along with; so
does that a value was made, which is lost with the connection as an answer is.

Threads: the agent's lock guards all of it; every method is called with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from dure.rpc.links import Link, Numbered
from dure.rpc.timers import Timers

__all__ = ["Delivery"]

_LATER_S = 0.005


@dataclass(slots=True, eq=False)
class _Peer:
    link: Link = field(default_factory=Link)
    queued: list[Numbered] = field(default_factory=list[Numbered])
    made: list[int] = field(default_factory=list[int])
    timed: bool = False


class Delivery:
    """The links of a process.

    Args:
        timers: For what waits.
        flush: Called with whom something is to be sent to that has waited long enough; no lock.

    Attributes:
        due: To whom something is to be sent now.
    """

    def __init__(self, timers: Timers, flush: Callable[[int], None]) -> None:
        self._timers, self._flush = timers, flush
        self._peers: dict[int, _Peer] = {}
        self.due: set[int] = set()

    def __contains__(self, peer: int) -> bool:
        return peer in self._peers

    def add(self, peer: int) -> None:
        """Take note of a process."""
        self._peers.setdefault(peer, _Peer())

    def remove(self, peer: int) -> None:
        """Forget a process that is gone."""
        self._peers.pop(peer, None)
        self.due.discard(peer)

    def queue(self, to: int, body: bytes, hurry: bool = True) -> None:
        """Leave something that must arrive for the next message that is sent."""
        peer = self._peers.get(to)
        if peer is None:
            return
        peer.queued.append(peer.link.send(body))
        if hurry:
            self.due.add(to)
        else:
            self._later(to, peer)

    def made(self, to: int, number: int) -> None:
        """Leave it for the next message that the value of a call was made."""
        peer = self._peers.get(to)
        if peer is not None:
            peer.made.append(number)
            self._later(to, peer)

    def again(self, to: int) -> None:
        """Send again on a new connection what may be lost."""
        peer = self._peers[to]
        peer.queued = peer.link.again()
        self.due.add(to)

    def receive(self, sender: int, numbered: Numbered) -> list[bytes]:
        """Return what can be delivered now, in order."""
        peer = self._peers.get(sender)
        if peer is None:
            return []
        bodies = peer.link.receive(numbered)
        if peer.link.owes:
            self._later(sender, peer)
        return bodies

    def take(self, to: int) -> tuple[list[Numbered], list[int]]:
        """Return what goes with the message that is sent now: of links, and values made."""
        self.due.discard(to)
        peer = self._peers.get(to)
        if peer is None:
            return [], []
        link, made = peer.queued, peer.made
        if link:
            peer.queued = []
        elif peer.link.owes:
            link = [peer.link.acknowledge()]
        if made:
            peer.made = []
        return link, made

    def num_kept(self, to: int) -> int:
        """How many messages to a process it has not said to have."""
        return self._peers[to].link.num_kept

    def _later(self, to: int, peer: _Peer) -> None:
        if not peer.timed:
            peer.timed = True
            self._timers.at(monotonic() + _LATER_S, partial(self._waited, to, peer))

    def _waited(self, to: int, peer: _Peer) -> None:
        peer.timed = False
        self._flush(to)
