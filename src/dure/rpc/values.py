"""The values of references: the owner keeps each while a process refers to it.

A value has an entry in its owner's table as soon as the owner knows that it will be made, and
processes that ask for it before are answered when it is made. `references` decides who refers to
which value; this file feeds it, and performs its actions.

Threads:
    The agent's lock guards the table and the state machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from dure.errors import RpcError
from dure.rpc import failures, references
from dure.rpc.codec import ReferenceRow
from dure.rpc.references import Freed, Held, References, RefId, Send, TokenAccepted
from dure.rpc.rref import RRef

if TYPE_CHECKING:
    from dure.rpc.agent import RpcAgent
    from dure.rpc.directory import Peer

__all__ = ["TOPIC", "Value", "Values"]

TOPIC = 0
"""Of reports about references."""

_FORGET_S = 0.01
"""How long a freed object may be counted, if no other message is sent."""

_LATER = frozenset({Held, TokenAccepted})
"""The messages that wait for another one to travel with."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(references.Message)


class Value(msgspec.Struct, eq=False):
    """A value that was made, or will be.

    Attributes:
        failure: The error of the call that was to make it (`failures.encode`); empty if none.
    """

    done: bool = False
    value: Any = None
    failure: bytes = b""
    watchers: list[Callable[[], None]] = []  # a struct copies the default


class Values:
    """The values of a process, and its references.

    Args:
        agent: The process's agent.
    """

    def __init__(self, agent: RpcAgent) -> None:
        self._agent = agent
        self._step, self._lock, self._todo = agent.step, agent.lock, agent.todo
        self._values: dict[RefId, Value] = {}
        self._references = References(agent.me.id)
        self.gone: deque[RefId] = deque()
        """References of freed objects that are still counted."""
        self._going = False

    # --- called by programs ------------------------------------------------------------------

    def begin(self, owner: int) -> RefId:
        """Create a reference, with one object, to a value that is about to be made at a process."""
        with self._lock:
            if owner != self._agent.me.id:
                return self._references.create(owner)
            ref = self._references.own()
            self._values[ref] = Value()
            return ref

    def set(self, ref: RefId, value: Any, failure: bytes = b"") -> None:
        """Set a value of this process, or why there is none, and notify its watchers."""
        with self._lock:
            entry = self._values.get(ref)
            if entry is None:
                return  # no process refers to it anymore
            entry.value, entry.failure, entry.done = value, failure, True
            watchers, entry.watchers = entry.watchers, []
            if ref[0] != self._agent.me.id:
                self._agent.directory.confirm(ref[0], ref)
        for watcher in watchers:
            watcher()

    def local(self, ref: RefId) -> Any:
        """Return a value of this process; waits until it is made.

        Raises:
            Exception: Raised by the call that was to make it.
        """
        transport = self._agent.transport
        with self._lock:
            entry = self._values[ref]
            ticket = None
            if not entry.done:
                ticket = transport.ticket()
                entry.watchers.append(partial(transport.complete, ticket))
        if ticket is not None and not transport.wait(ticket):
            raise RpcError("RPC was shut down before this value was made")
        if entry.failure:
            raise failures.decode(entry.failure, self._agent.me.id)
        return entry.value

    def pack(self, ref: RefId, to: int) -> ReferenceRow:
        """Return the row for a reference in a message.

        Raises:
            KeyError: It is lost.
        """
        with self._lock:
            owner, token = self._references.pack(ref, to)
            return ReferenceRow(ref, owner, token)

    def not_sent(self, rows: Iterable[ReferenceRow], make: RefId | None = None) -> None:
        """Take back the references of a message that was not sent."""
        tokens = [row.token for row in rows]
        if tokens or make is not None:
            with self._step():
                self.act(self._references.not_sent(tokens, make))

    def is_held(self, ref: RefId) -> bool:
        """Whether the owner knows that this process holds a reference."""
        with self._lock:
            return self._references.is_held(ref)

    def is_usable(self, ref: RefId) -> bool:
        """Whether RPC has not ended, and the value of a reference is not known to be lost."""
        return not self._agent.calls.closed and self._references.has(ref)

    def why_lost(self, ref: RefId, owner: int) -> Exception | None:
        """Return why the value of a reference is lost; None if it is not."""
        with self._lock:
            if self._references.has(ref):
                return None
        lost = self._agent.lost(owner)
        return lost or RpcError(
            "the value of this reference was never made, or its messages were lost"
        )

    def forget(self, ref: RefId) -> None:
        """Record that an `RRef` was freed; for finalizers, so it takes no lock."""
        self.gone.append(ref)
        if not self._going and not self._agent.closed:
            self._going = True
            self._agent.timers.at(monotonic() + _FORGET_S, self._forget_late)

    def _forget_late(self) -> None:
        self._going = False
        self.forget_gone()

    def forget_gone(self, except_for: int = -1) -> None:
        """Stop counting freed objects; nothing is sent yet to `except_for`."""
        if not self.gone:
            return
        with self._step(except_for):
            while self.gone:
                self.act(self._references.dropped(self.gone.popleft()))

    # --- messages and events, with the lock --------------------------------------------------

    def find(self, ref: RefId) -> Value | None:
        """Return a value for a process that fetches it; None if there is no such reference."""
        if not self._references.expect(ref):
            return None
        value = self._values.get(ref)
        if value is None:
            value = self._values[ref] = Value()
        return value

    def take_make(self, ref: RefId, sender: int) -> None:
        """Record a value that a call will make.

        Raises:
            ValueError: Another process has created the reference.
        """
        if sender != self._agent.me.id:
            self._references.made(ref, sender)
            if ref not in self._values:
                self._values[ref] = Value()

    def take(self, row: ReferenceRow, sender: int) -> RRef[Any]:
        """Return the object for a reference in a message.

        Raises:
            RpcError: No process has the id of the owner.
        """
        self._agent.info(row.owner)
        known, actions = self._references.arrived(row.ref, row.owner, sender, row.token)
        self.act(actions)
        if known and row.owner == self._agent.me.id:
            self._values.setdefault(row.ref, Value())  # the call that makes it may arrive later
        return RRef.received(self._agent, row.ref, row.owner, known)

    def hear(self, sender: int, body: bytes) -> None:
        """Handle a message about references."""
        message = _decoder.decode(body)
        if type(message) is Held:
            self.held(sender, message.ref)
        else:
            self.act(self._references.heard(sender, message))

    def held(self, sender: int, ref: RefId) -> None:
        """Handle that the owner has confirmed a hold, in a report or with the value itself."""
        self.act(self._references.heard(sender, Held(ref)))
        if ref[0] == self._agent.me.id:
            self._agent.caller.made(sender, ref)

    def report_confirmed(self, peer: Peer) -> None:
        """Queue the reports of values that calls of a process have made here."""
        for ref in list(peer.confirmed):
            if peer.confirmed.pop(ref, False):
                self._agent.queue(peer.id, TOPIC, _encoder.encode(Held(ref)), hurry=False)

    def died(self, worker: int) -> None:
        """Handle that a process is gone."""
        self.act(self._references.died(worker))

    def act(self, actions: Iterable[references.Action]) -> None:
        """Perform actions of the state machine."""
        for action in actions:
            if isinstance(action, Send):
                message = action.message
                hurry = type(message) not in _LATER
                self._agent.queue(action.to, TOPIC, _encoder.encode(message), hurry)
            elif isinstance(action, Freed):
                value = self._values.pop(action.ref, None)
                if value is not None and value.value is not None:
                    self._todo.append(partial(self._agent.release, [value]))
            else:
                self._agent.caller.never_made(action.ref)
                never = self._values.pop(action.ref, None)
                if never is not None:
                    error = RpcError("the call that was to make this value never arrived")
                    never.failure, never.done = failures.encode(error, self._agent.me), True
                    self._todo += never.watchers

    # --- queries, and the end ----------------------------------------------------------------

    @property
    def counts(self) -> tuple[int, int, int]:
        """Count values that others hold, their holds, and unsettled ones."""
        held = [len(holders) for holders in self._references.holders().values()]
        return sum(map(bool, held)), sum(held), self._references.num_unsettled

    def close(self) -> None:
        """Free all values."""
        with self._lock:
            values, self._values = self._values, {}
        values.clear()
