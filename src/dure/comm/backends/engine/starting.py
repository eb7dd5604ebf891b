"""How an operation of a foreign engine is started, remembered, and ended with its group.

An engine reports trouble in two ways: it refuses to start, or what it started fails. Both become
our errors (`EngineState.translate`). What runs asynchronously is remembered, because leaving a
group depends on it: with nothing pending the engine leaves in order, otherwise it is broken off.
Collectives are kept until they have ended, for the engine uses their memory; messages only as long
as the user keeps their tickets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from weakref import WeakSet

from dure.comm.backends.base import BackendOptions, Ticket
from dure.comm.backends.engine.calls import EngineCalls, EngineWork
from dure.comm.backends.engine.tickets import CollectiveTicket, EngineState, MessageTicket
from dure.comm.backends.engine.trouble import TroubleLog
from dure.errors import DureError

__all__ = ["Starter"]

Start = Callable[[EngineCalls], EngineWork]


class Starter:
    """Starts one rank's operations on an engine, until the group is left.

    Args:
        engine: The engine's calls.
        options: What the group is.
    """

    def __init__(self, engine: EngineCalls, options: BackendOptions) -> None:
        self._engine: EngineCalls | None = engine
        self._in_stream = engine.in_stream
        self._patience = options.patience
        store = options.store if options.patience is None else None
        self._trouble = TroubleLog(store, options.rank, options.size)
        self._state = EngineState(
            options.name, options.rank, options.size, self._trouble.ask, self._break_off
        )
        self._collectives: set[CollectiveTicket] = set()
        self._messages: WeakSet[MessageTicket] = WeakSet()

    def run(
        self, op: str, start: Start, async_op: bool, land: Callable[[], object] | None = None
    ) -> Ticket | None:
        """Start the engine's work and, unless asynchronous, wait for it.

        Args:
            op: The operation's name.
            start: Starts it.
            async_op: Return a ticket at once.
            land: Brings the result to the user's tensors when the engine is done.
        """
        ticket = CollectiveTicket(self._state, op, self._begin(op, start), land, self._in_stream)
        if not async_op:
            ticket.wait()
            return None
        self._collectives = {t for t in self._collectives if not t.ended}
        self._collectives.add(ticket)
        return ticket

    def message(self, op: str, start: Start, peer: int | None) -> MessageTicket:
        """Start to send to a rank, or to receive from one; None: from anyone."""
        ticket = MessageTicket(self._state, op, self._begin(op, start, peer), peer, self._patience)
        self._messages.add(ticket)
        return ticket

    def _begin(self, op: str, start: Start, peer: int | None = None) -> EngineWork:
        began = time.monotonic()
        try:
            if self._engine is None:
                raise RuntimeError("the group was left")
            return start(self._engine)
        except RuntimeError as e:
            if isinstance(e, DureError):
                raise
            raise self._state.translate(e, op, began, peer) from e

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long an operation may wait for its peers."""
        self._patience = timeout  # of messages, which engines otherwise give what they began with
        if self._engine is not None:
            self._engine.set_timeout(timeout)

    def _break_off(self) -> None:
        if self._engine is not None:
            self._engine.break_off()

    def close(self, abort: bool) -> None:
        """Leave the group, and break off what is pending; later calls do nothing."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        pending = not all(t.ended for t in [*self._collectives, *self._messages])
        self._state.left.set()
        self._trouble.say("left")
        if abort or pending:
            engine.break_off()
        else:
            engine.leave()
