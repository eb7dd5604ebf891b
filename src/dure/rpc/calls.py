"""The calls of a process that are under way: who is called, room for more, and time.

**Room.** How many bytes of unanswered calls are under way to each process is counted, and a thread
of the program waits while there are too many. Others do not: their calls are what frees the room.

**Time.** All calls have deadlines, and hardly any is reached: one timer, for the earliest, looks at
all calls that are under way then.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from dure.errors import RpcError
from dure.rpc.directory import Peer
from dure.rpc.envelope import Kind, Transport, Waiter
from dure.rpc.references import RefId
from dure.rpc.timers import Timers
from dure.trace.flight import Noted

if TYPE_CHECKING:
    from dure.rpc.caller import Caller

__all__ = ["MOST_BYTES", "Call", "CallFuture", "Calls"]

MOST_BYTES = 1 << 30
"""How much of unanswered calls to one process may be under way before the program must wait."""


class Call(msgspec.Struct, eq=False):
    """A call that was made.

    Attributes:
        ticket: Complete when the outcome is known; with `notify`, when that completes it.
        outcome: The answer, or an error.
        notify: Called once with the call, by a thread that may run code of the program.
        quick: Whether `notify` runs no code of the program, except to unpickle.
        awaited: Whether a waiting thread will call `notify`.
        counted: False for calls of RPC's own, which no shutdown waits for.
        noted: Its entry in the flight recorder.
    """

    kind: Kind
    peer: Peer
    function: str
    ref: RefId | None
    ticket: Waiter
    seconds: float
    deadline: float
    nbytes: int
    notify: Callable[[Call], None] | None
    counted: bool
    noted: Noted
    quick: bool = False
    awaited: bool = False
    number: int = 0
    outcome: Any = None

    @property
    def what(self) -> str:
        """The call, for people."""
        return f"{self.function} on {self.peer.info.name}"


class CallFuture(torch.futures.Future[Any]):
    """A future of torch's whose waiting thread receives messages.

    Callbacks run in a thread of RPC's that counts as one that runs a call. Those that C++ adds
    (`torch.futures.collect_all`) are not known here: they may run in a thread that waits for this
    very future.
    """

    caller: Caller
    call: Call

    def wait(self) -> Any:
        """Wait for the answer, and return the value.

        Raises:
            Exception: What the callee has raised, or what went wrong on the way.
        """
        if not self.done():
            self.caller.wait_until_notified(self.call)
        return self.value() if self.done() else super().wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> Any:
        """Have something done with the future when it is done; see torch."""
        self.call.quick = False
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Have something called when the future is done; see torch."""
        self.call.quick = False
        super().add_done_callback(callback)

    def complete(self, call: Call) -> None:
        """Set the outcome of the call; a waiting thread does not wait for callbacks."""
        try:
            value = self.caller.result(call)
        except BaseException as error:
            value = self.caller.error_maker(call) or partial(_another, error.with_traceback(None))
            self._set_unwrap_func(_raise)
        self.caller.complete_wait(call)  # the rest of the wait is torch's
        self.set_result(value)


class Calls:
    """The table.

    Args:
        lock: The agent's; the methods take it, but for those that say otherwise.
        transport: Carries the calls.
        timers: For deadlines.
        fail: Told of a call whose time is over, and the error.

    Attributes:
        made: How many there were, but for RPC's own.
        closed: Whether there are to be no more.
    """

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        transport: Transport,
        timers: Timers,
        fail: Callable[[Call, Exception], None],
    ) -> None:
        self._lock, self._transport, self._timers, self._fail = lock, transport, timers, fail
        self._calls: dict[int, Call] = {}
        self._number = self.made = 0
        self._sweep_at = inf
        self.closed = False

    def add(self, call: Call, may_wait: bool) -> bool:
        """Put a call into the table, when there is room; False: the callee is gone.

        Args:
            call: The call; gets its number.
            may_wait: Whether there must be room.

        Raises:
            RpcError: There was no room within the call's timeout.
        """
        peer = call.peer
        while True:
            with self._lock:
                if peer.ended is not None or self.closed:
                    return False
                after = peer.nbytes + call.nbytes
                if after <= MOST_BYTES or not peer.nbytes or not may_wait:
                    peer.nbytes = after
                    self._number = call.number = self._number + 1
                    self._calls[call.number] = call
                    self.made += call.counted
                    break
                ticket = self._transport.ticket()
                peer.blocked.append(ticket)
            if not self._transport.wait(ticket, max(0.0, call.deadline - monotonic())):
                with self._lock:
                    if ticket in peer.blocked:
                        peer.blocked.remove(ticket)
                raise _timeout(call)
        if call.deadline < self._sweep_at:
            self._sweep_by(call.deadline)
        return True

    def take(self, number: int, sender: int | None = None) -> Call | None:
        """Take a call out of the table; None: it has ended, or `sender` is not who was called."""
        with self._lock:
            try:
                call = self._calls[number]
            except KeyError:
                return None
            if sender is not None and sender != call.peer.id:
                return None
            del self._calls[number]
            call.peer.nbytes -= call.nbytes
        if call.peer.blocked:
            self.unblock(call.peer)
        return call

    def unblock(self, peer: Peer) -> None:
        """Wake who waits for room, to look again."""
        with self._lock:
            blocked, peer.blocked = peer.blocked, []
        for ticket in blocked:
            self._transport.complete(ticket)

    def all(self, to: int | None = None) -> list[Call]:
        """With the lock: return those under way, to one process or all."""
        return [call for call in self._calls.values() if to is None or call.peer.id == to]

    @property
    def nbytes(self) -> int:
        """How much is under way."""
        return sum(call.nbytes for call in self._calls.values())

    def _sweep_by(self, when: float) -> None:
        with self._lock:
            if when >= self._sweep_at:
                return
            self._sweep_at = when
        self._timers.at(when, self._sweep)

    def _sweep(self) -> None:
        """End the calls whose time is over, and look again when the next one's is."""
        now = monotonic()
        with self._lock:
            calls = self.all()
            self._sweep_at = inf
        for call in calls:
            if call.deadline <= now:
                self._fail(call, _timeout(call))
        due = min((call.deadline for call in calls if call.deadline > now), default=inf)
        if due < inf:
            self._sweep_by(due)


def _timeout(call: Call) -> RpcError:
    return RpcError(
        f"RPC ran for more than set timeout ({call.seconds * 1000:.0f} ms) and will now be "
        "marked with an error",
        op=call.what,
        peer=call.peer.id,
        fix="Give a larger timeout; 0 is none.",
    )


def _raise(failed: Callable[[], BaseException]) -> None:
    """Raise a new exception for what a future has.

    Were it one and the same, its traceback would hold the frames that hold the future, in a circle
    through C++ that Python cannot see, so that neither they nor their tensors were ever freed.
    """
    raise failed()


def _another(error: BaseException) -> BaseException:
    """Return an exception like one that was raised here."""
    try:
        another = copy(error)
    except Exception:  # one that cannot be made of its `args`
        another = RpcError(f"{type(error).__module__}.{type(error).__qualname__}", seen=str(error))
    another.__cause__ = error.__cause__
    return another
