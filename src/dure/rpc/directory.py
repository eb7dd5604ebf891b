"""The processes that this one knows, and the messages that are queued for each.

Reports (messages of references and of distributed autograd) must arrive in order. They travel with
other messages, or by themselves, some through a ring of shared memory and some through a socket, so
they are numbered, and delivered in the order of the numbers. Those that are not urgent wait a
little for another message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from dure.errors import PeerLost, RpcError, UsageError
from dure.rpc.message import Numbered
from dure.rpc.names import WorkerInfo
from dure.rpc.references import RefId
from dure.rpc.timers import Timers

__all__ = ["Directory", "Peer"]

_LATER_S = 0.005


@dataclass(slots=True, eq=False)
class Peer:
    """A process; this one is one of them.

    Attributes:
        id: Its id.
        ended: How it ended; None if it is not gone.
        sent: The number of the last report to it.
        received: The number of the last report from it that was delivered.
        early: Reports from it that wait for others, by number.
        queued: Reports to send with the next message to it.
        confirmed: Values that its calls have made here, without a report yet. A thread that
            removes one reports it, and needs no lock.
        timed: Whether a timer will send what is queued.
    """

    info: WorkerInfo
    id: int
    ended: str | None = None
    sent: int = 0
    received: int = 0
    early: dict[int, bytes] = field(default_factory=dict[int, bytes])
    queued: list[Numbered] = field(default_factory=list[Numbered])
    confirmed: dict[RefId, bool] = field(default_factory=dict[RefId, bool])
    timed: bool = False


class Directory:
    """The processes that this one knows.

    Args:
        timers: For messages that are not urgent.
        flush: Called without the lock with a peer whose queued messages are due.
        look: Checks whether a process of that name or id has joined since.

    Attributes:
        due: The peers whose queued messages are sent at once, by id.

    Threads:
        The agent's lock guards changes; `reach`, `info` and `lost` need none.
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
        self._named[worker.name] = self._peers.setdefault(worker.id, Peer(worker, worker.id))

    def remove(self, id: int, how: str) -> Peer:
        """Mark a process as gone for good, and how it ended."""
        peer = self._peers.setdefault(id, Peer(WorkerInfo(str(id), id), id))
        peer.ended, peer.queued = how, []
        peer.confirmed.clear()
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

    # --- reports -----------------------------------------------------------------------------

    def queue(self, to: int, body: bytes, hurry: bool = True) -> None:
        """Queue a report, to travel with the next message to a process."""
        peer = self.get(to)
        if peer is not None:
            peer.sent += 1
            peer.queued.append(Numbered(peer.sent, body))
            if hurry:
                self.due[to] = peer
            else:
                self._send_later(peer)

    def confirm(self, to: int, ref: RefId) -> None:
        """Report to a process, with the next message or a little later, that its value is made."""
        peer = self.get(to)
        if peer is not None:
            peer.confirmed[ref] = True
            self._send_later(peer)

    def _send_later(self, peer: Peer) -> None:
        if not peer.timed:
            peer.timed = True
            self._timers.at(monotonic() + _LATER_S, partial(self._waited, peer))

    def receive(self, sender: int, messages: Iterable[Numbered]) -> list[bytes]:
        """Return the reports that can be delivered now, in order."""
        peer = self.get(sender)
        due: list[bytes] = []
        if peer is None:
            return due
        for message in messages:
            if message.number != peer.received + 1:
                peer.early[message.number] = message.body
                continue
            peer.received += 1
            due.append(message.body)
            while peer.early and peer.received + 1 in peer.early:
                peer.received += 1
                due.append(peer.early.pop(peer.received))
        return due

    def take(self, peer: Peer) -> tuple[Numbered, ...]:
        """Return the reports that travel with a message that is sent now."""
        self.due.pop(peer.id, None)
        queued = tuple(peer.queued)
        peer.queued.clear()
        return queued

    def _waited(self, peer: Peer) -> None:
        peer.timed = False
        self._flush(peer)
