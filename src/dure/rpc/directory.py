"""Who is there, who was, and what is to be sent to each of them.

What must arrive, of references and of distributed autograd, is numbered by a link (`links`) and
rides along with other messages, or goes by itself. What is in no hurry waits a little for a message
to ride along with; so do acknowledgements, and that a value was made, which is lost with the
connection as an answer is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from dure.errors import PeerLost, RpcError, UsageError
from dure.rpc.envelope import Waiter, Work
from dure.rpc.links import Link, Numbered
from dure.rpc.names import WorkerInfo
from dure.rpc.timers import Timers

__all__ = ["Directory", "Peer"]

_LATER_S = 0.005


@dataclass(slots=True, eq=False)
class Peer:
    """A process, this one among them.

    Attributes:
        id: Its id.
        ended: How, if it is gone.
        queued: What goes with the next message to it.
        made: Its calls whose values have been made, of which it is to be told.
        deferred: Calls of it that wait for a message of the link, by its number.
        timed: Whether what waits is sent before long.
        nbytes: Of this process's calls to it that are not answered.
        blocked: Who waits for these to be fewer.
    """

    info: WorkerInfo
    id: int = field(init=False)
    ended: str | None = None
    link: Link = field(default_factory=Link)
    queued: list[Numbered] = field(default_factory=list[Numbered])
    made: list[int] = field(default_factory=list[int])
    deferred: list[tuple[int, Work]] = field(default_factory=list[tuple[int, Work]])
    timed: bool = False
    nbytes: int = 0
    blocked: list[Waiter] = field(default_factory=list[Waiter])

    def __post_init__(self) -> None:
        self.id = self.info.id


class Directory:
    """The processes that this one knows.

    Args:
        timers: For what waits.
        flush: Called with whom something is to be sent to, without the lock.
        look: Finds out whether one of that name, or id, has joined meanwhile.

    Attributes:
        due: Whom something is to be sent to now, by id.

    Threads: the agent's lock guards changes; `reach`, `info` and `lost` need none.
    """

    def __init__(
        self, timers: Timers, flush: Callable[[Peer], None], look: Callable[[str | int], None]
    ) -> None:
        self._timers, self._flush, self._look = timers, flush, look
        self._peers: dict[int, Peer] = {}
        self._named: dict[str, Peer] = {}
        self.due: dict[int, Peer] = {}

    def add(self, worker: WorkerInfo) -> None:
        """Take note of one that joined."""
        self._named[worker.name] = self._peers.setdefault(worker.id, Peer(worker))

    def remove(self, id: int, how: str) -> Peer:
        """Take note of one that is gone for good, and how it ended."""
        peer = self._peers.setdefault(id, Peer(WorkerInfo(str(id), id)))
        peer.ended, peer.link = how, Link()
        peer.queued, peer.made, peer.deferred = [], [], []
        self.due.pop(id, None)
        return peer

    def get(self, id: int) -> Peer | None:
        """Return one that is there."""
        peer = self._peers.get(id)
        return peer if peer is not None and peer.ended is None else None

    def workers(self) -> list[WorkerInfo]:
        """Return who is there, by id."""
        return [peer.info for _, peer in sorted(self._peers.items()) if peer.ended is None]

    def reach(self, to: str | int | WorkerInfo) -> Peer:
        """Return who is meant; by its `WorkerInfo` one that is gone, too.

        Raises:
            RpcError: Nobody has that name or id.
            PeerLost: It is gone.
            UsageError: It is no name, id or `WorkerInfo`.
        """
        found = None
        if type(to) is str:
            found = self._named.get(to)
        elif type(to) is WorkerInfo:
            found = self._peers.get(to.id)
        if found is not None and found.ended is None:
            return found
        return self._search(to)

    def _search(self, to: str | int | WorkerInfo) -> Peer:
        key = to.id if isinstance(to, WorkerInfo) else to
        found = self._known(key)
        if found is not None and (found.ended is None or key is not to):
            return found
        self._look(key)
        found = self._known(key)
        if found is None:
            names = ", ".join(sorted(self._named))
            raise RpcError(
                "could not find destination", seen=f"{key!r}", fix=f"There are: {names}."
            )
        if (lost := self.lost(found.id)) is not None:
            raise lost
        return found

    def _known(self, key: str | int) -> Peer | None:
        if isinstance(key, str):
            return self._named.get(key)
        if isinstance(key, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            return self._peers.get(key)
        raise UsageError(
            "a worker is told by its name, its id or its WorkerInfo", op="rpc", seen=repr(key)
        )

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """Return who is meant; see `reach`."""
        return self.reach(to).info

    def info(self, id: int) -> WorkerInfo:
        """Return a worker by its id, be it gone."""
        return self._peers[id].info

    def lost(self, id: int) -> PeerLost | None:
        """Return the error about one that is gone; None: it is not."""
        peer = self._peers.get(id)
        if peer is None or peer.ended is None:
            return None
        text = f"worker {peer.info.name!r} (id {id}) is gone"
        return PeerLost(text, peer=id, exit=peer.ended or None, op="rpc", seen=peer.ended)

    # --- what must arrive --------------------------------------------------------------------

    def queue(self, to: int, body: bytes, hurry: bool = True) -> None:
        """Leave something that must arrive for the next message that is sent."""
        peer = self.get(to)
        if peer is not None:
            peer.queued.append(peer.link.send(body))
            if hurry:
                self.due[to] = peer
            else:
                self._later(peer)

    def made(self, to: int, number: int) -> None:
        """Leave it for the next message that the value of a call was made."""
        peer = self.get(to)
        if peer is not None:
            peer.made.append(number)
            self._later(peer)

    def again(self, to: int) -> None:
        """Send again on a new connection what may be lost."""
        peer = self.get(to)
        if peer is not None:
            peer.queued = peer.link.again()
            self.due[to] = peer

    def receive(self, sender: int, messages: Iterable[Numbered]) -> list[bytes]:
        """Return what can be delivered now, in order."""
        peer = self.get(sender)
        if peer is None:
            return []
        bodies = [body for message in messages for body in peer.link.receive(message)]
        if peer.link.acknowledged < peer.link.received:
            self._later(peer)
        return bodies

    def defer(self, sender: int, after: int, work: Work) -> bool:
        """Keep work until all messages up to a number have come; False: they have, or cannot."""
        peer = self.get(sender)
        if peer is None or peer.link.received >= after:
            return False
        peer.deferred.append((after, work))
        return True

    def take_deferred(self, sender: int) -> list[Work]:
        """Return the work that waits no longer."""
        peer = self.get(sender)
        if peer is None or not peer.deferred:
            return []
        ready = [work for after, work in peer.deferred if after <= peer.link.received]
        peer.deferred = [each for each in peer.deferred if each[0] > peer.link.received]
        return ready

    def take(self, peer: Peer) -> tuple[tuple[Numbered, ...], tuple[int, ...]]:
        """Return what goes with the message that is sent now: of links, and values made."""
        self.due.pop(peer.id, None)
        link, made = tuple(peer.queued), tuple(peer.made)
        if link:
            peer.queued.clear()
        elif peer.link.acknowledged < peer.link.received:
            link = (peer.link.acknowledge(),)
        if made:
            peer.made.clear()
        return link, made

    def _later(self, peer: Peer) -> None:
        if not peer.timed:
            peer.timed = True
            self._timers.at(monotonic() + _LATER_S, partial(self._waited, peer))

    def _waited(self, peer: Peer) -> None:
        peer.timed = False
        self._flush(peer)
