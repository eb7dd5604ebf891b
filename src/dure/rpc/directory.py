"""The processes that this one knows, and the messages that are queued for each.

Reliable messages (of references and of distributed autograd) are numbered by a link (`links`), and
travel with other messages, or by themselves. Those that are not urgent wait a little for another
message; so do acknowledgements, and reports that a value was made, which are lost with the
connection as an answer is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from dure.errors import PeerLost, RpcError, UsageError
from dure.rpc.links import Numbered, ReliableLink
from dure.rpc.message import Waiter, Work
from dure.rpc.names import WorkerInfo
from dure.rpc.timers import Timers

__all__ = ["Directory", "Peer"]

_LATER_S = 0.005


@dataclass(slots=True, eq=False)
class Peer:
    """A process; this one is one of them.

    Attributes:
        id: Its id.
        ended: How it ended; None if it is not gone.
        queued: Reliable messages to send with the next message to it.
        made: Its MAKE calls that have succeeded, to report with the next message to it.
        deferred: Its calls that wait for a reliable message, by the message's number.
        timed: Whether a timer will send what is queued.
        nbytes: Bytes of this process's unanswered calls to it.
        blocked: Waiters of threads that wait until these are fewer.
    """

    info: WorkerInfo
    id: int = field(init=False)
    ended: str | None = None
    link: ReliableLink = field(default_factory=ReliableLink)
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
        timers: For messages that are not urgent.
        flush: Called without the lock with a peer whose queued messages are due.
        look: Checks whether a process of that name or id has joined since.

    Attributes:
        due: The peers whose queued messages are sent at once, by id.

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
        """Add a process that joined."""
        self._named[worker.name] = self._peers.setdefault(worker.id, Peer(worker))

    def remove(self, id: int, how: str) -> Peer:
        """Mark a process as gone for good, and how it ended."""
        peer = self._peers.setdefault(id, Peer(WorkerInfo(str(id), id)))
        peer.ended, peer.link = how, ReliableLink()
        peer.queued, peer.made, peer.deferred = [], [], []
        self.due.pop(id, None)
        return peer

    def get(self, id: int) -> Peer | None:
        """Return a process; None if it is unknown or gone."""
        peer = self._peers.get(id)
        return peer if peer is not None and peer.ended is None else None

    def workers(self) -> list[WorkerInfo]:
        """Return the processes that are not gone, by id."""
        return [peer.info for _, peer in sorted(self._peers.items()) if peer.ended is None]

    def reach(self, to: str | int | WorkerInfo) -> Peer:
        """Return the process with a name, an id or a `WorkerInfo`.

        Raises:
            RpcError: No process has that name or id.
            PeerLost: It is gone.
            UsageError: `to` is not a name, an id or a `WorkerInfo`.
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
                "could not find destination", seen=f"{key!r}", fix=f"Known workers: {names}."
            )
        if (lost := self.lost(found.id)) is not None:
            raise lost
        return found

    def _known(self, key: str | int) -> Peer | None:
        if isinstance(key, str):
            return self._named.get(key)
        if isinstance(key, int) and not isinstance(key, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            return self._peers.get(key)
        raise UsageError(
            "a callee must be a worker's name, id or WorkerInfo",
            op="rpc",
            seen=repr(key),
            fix="Pass the name that the callee has given to init_rpc.",
        )

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """Return the worker with a name, an id or a `WorkerInfo`; see `reach`."""
        return self.reach(to).info

    def info(self, id: int) -> WorkerInfo:
        """Return a worker by its id, also if it is gone.

        Raises:
            RpcError: No process had that id.
        """
        peer = self._peers.get(id)
        if peer is None:
            raise RpcError(f"there is no worker with id {id}", op="rpc")
        return peer.info

    def lost(self, id: int) -> PeerLost | None:
        """Return the error about a process that is gone; None if it is not."""
        peer = self._peers.get(id)
        if peer is None or peer.ended is None:
            return None
        text = f"worker {peer.info.name!r} (id {id}) is gone"
        return PeerLost(text, peer=id, exit=peer.ended or None, op="rpc", seen=peer.ended)

    # --- reliable messages -------------------------------------------------------------------

    def queue(self, to: int, body: bytes, hurry: bool = True) -> None:
        """Queue a reliable message, to travel with the next message to a process."""
        peer = self.get(to)
        if peer is not None:
            peer.queued.append(peer.link.send(body))
            if hurry:
                self.due[to] = peer
            else:
                self._later(peer)

    def made(self, to: int, number: int) -> None:
        """Queue the report that a MAKE call has succeeded."""
        peer = self.get(to)
        if peer is not None:
            peer.made.append(number)
            self._later(peer)

    def again(self, to: int) -> None:
        """Queue all messages that may be lost, for a new connection."""
        peer = self.get(to)
        if peer is not None:
            peer.queued = peer.link.again()
            self.due[to] = peer

    def receive(self, sender: int, messages: Iterable[Numbered]) -> list[bytes]:
        """Return the messages that can be delivered now, in order."""
        peer = self.get(sender)
        if peer is None:
            return []
        bodies = [body for message in messages for body in peer.link.receive(message)]
        if peer.link.acknowledged < peer.link.received:
            self._later(peer)
        return bodies

    def defer(self, sender: int, after: int, work: Work) -> bool:
        """Keep work until all messages up to a number have arrived; False if it need not wait."""
        peer = self.get(sender)
        if peer is None or peer.link.received >= after:
            return False
        peer.deferred.append((after, work))
        return True

    def take_deferred(self, sender: int) -> list[Work]:
        """Return work whose messages have arrived."""
        peer = self.get(sender)
        if peer is None or not peer.deferred:
            return []
        ready = [work for after, work in peer.deferred if after <= peer.link.received]
        peer.deferred = [each for each in peer.deferred if each[0] > peer.link.received]
        return ready

    def take(self, peer: Peer) -> tuple[tuple[Numbered, ...], tuple[int, ...]]:
        """Return what travels with a message that is sent now: reliable messages, and `made`."""
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
