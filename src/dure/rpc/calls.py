"""The table of a process's pending calls, and their deadlines.

Few calls reach their deadlines: one timer, for the earliest, checks all pending calls when it
expires.
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
from dure.rpc.message import MAKE, MessageType
from dure.rpc.references import RefId
from dure.rpc.timers import Timers

if TYPE_CHECKING:
    from dure.native import Outbox, Ticket
    from dure.rpc.caller import Caller

__all__ = ["CallFuture", "CppFuture", "PendingCall", "PendingCalls", "number_of"]

CppFuture: Any = torch.futures.Future.__mro__[1]
"""The C++ class of torch's futures: `then` returns it, and torch's class only calls its methods."""


def number_of(ref: RefId) -> int:
    """Return the number of the call that makes the value of a reference of this process."""
    return -ref[1]  # those of other calls are positive


class PendingCall(msgspec.Struct, eq=False):
    """A call that was made.

    Attributes:
        function: Its name, for error messages.
        seconds: Its timeout; 0 if none.
        ticket: Set when the outcome is known; if there is `notify`, by that.
        notify: Called once with the call, by a thread that may run code of the program.
        make: The reference that it makes or fetches.
        counted: False for calls of RPC's own, for which no shutdown waits.
        quick: Whether `notify` runs no code of the program, except to unpickle.
        awaited: Whether a waiting thread will call `notify`.
        noted: Its entry in the flight recorder.
        outcome: The answer (`Received`), or an error.
        asked: Through which the transport has sent it, for `HostTransport.wait`.
    """

    kind: MessageType
    peer: Peer
    function: str
    seconds: float
    ticket: Ticket
    notify: Callable[[PendingCall], None] | None = None
    make: RefId | None = None
    counted: bool = True
    deadline: float = inf
    noted: Any = None
    quick: bool = False
    awaited: bool = False
    number: int = 0
    outcome: Any = None
    asked: Outbox | None = None

    @property
    def what(self) -> str:
        """The call, for error messages."""
        return f"{self.function} on {self.peer.info.name}"


class CallFuture(torch.futures.Future[Any]):
    """A `torch.futures.Future` whose waiting thread receives messages.

    Callbacks run in a thread of RPC that counts as running a call. Callbacks that C++ adds
    (`torch.futures.collect_all`) are not known here: they may run in a thread that waits for this
    future.
    """

    caller: Caller
    call: PendingCall

    def __init__(self) -> None:
        CppFuture.__init__(self, [])

    def wait(self) -> Any:
        """Wait for the answer, and return the value.

        Raises:
            Exception: Raised by the callee, or by the way to it.
        """
        if not CppFuture.done(self):
            self.caller.wait_until_notified(self.call)
        return CppFuture.value(self) if CppFuture.done(self) else super().wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> Any:
        """Return a future of what a callback returns for this one; see torch."""
        self.call.quick = False
        after = super().then(callback)
        self.caller.complete_now(self.call)
        return after

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Have a function called when the future is done; see torch."""
        self.call.quick = False
        super().add_done_callback(callback)
        self.caller.complete_now(self.call)

    def complete(self, call: PendingCall) -> None:
        """Set the outcome of the call; a waiting thread does not wait for callbacks."""
        try:
            value = self.caller.result(call)
        except BaseException as error:
            value = self.caller.error_maker(call) or partial(_another, error.with_traceback(None))
            self._set_unwrap_func(_raise)
        self.caller.transport.complete(call.ticket)  # the rest of the wait is torch's
        CppFuture.set_result(self, value)


class PendingCalls:
    """The table.

    Args:
        lock: The agent's lock; the methods take it, except those that say otherwise.
        timers: For deadlines.
        fail: Called with a call that has timed out, and the error.

    Attributes:
        made: How many calls were made, without RPC's own.
        closed: Whether no more calls may be made.
    """

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        timers: Timers,
        fail: Callable[[PendingCall, Exception], None],
    ) -> None:
        self._lock, self._timers, self._fail = lock, timers, fail
        self._calls: dict[int, PendingCall] = {}
        self._number = self.made = 0
        self._sweep_at = inf
        self.closed = False

    def add(self, call: PendingCall) -> bool:
        """Put a call into the table, and set its number; return False if the callee is gone."""
        with self._lock:
            if call.peer.ended is not None or self.closed:
                return False
            if call.kind is MAKE and call.make is not None:
                call.number = number_of(call.make)
            else:
                self._number = call.number = self._number + 1
            self._calls[call.number] = call
            self.made += call.counted
        if call.deadline < self._sweep_at:
            self._sweep_by(call.deadline)
        return True

    def take(self, number: int, sender: int | None = None) -> PendingCall | None:
        """Remove and return a call; None if it has ended, or if `sender` is not its callee."""
        with self._lock:
            try:
                call = self._calls[number]
            except KeyError:
                return None
            if sender is not None and sender != call.peer.id:
                return None
            del self._calls[number]
        return call

    def all(self, to: int | None = None) -> list[PendingCall]:
        """With the lock: return the pending calls, to one process or all."""
        return [call for call in self._calls.values() if to is None or call.peer.id == to]

    def _sweep_by(self, when: float) -> None:
        with self._lock:
            if when >= self._sweep_at:
                return
            self._sweep_at = when
        self._timers.at(when, self._sweep)

    def _sweep(self) -> None:
        """End the calls that have timed out, and set the timer for the next deadline."""
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


def _timeout(call: PendingCall) -> RpcError:
    return RpcError(
        f"RPC ran for more than set timeout ({call.seconds * 1000:.0f} ms) and will now be "
        "marked with an error",
        op=call.what,
        peer=call.peer.id,
        fix="Give a larger timeout; 0 is none.",
    )


def _raise(failed: Callable[[], BaseException]) -> None:
    """Raise a new exception for the error of a future.

    The traceback of a shared exception would hold the frames that hold the future, in a cycle
    through C++ that Python cannot see, so that neither they nor their tensors were ever freed.
    """
    raise failed()


def _another(error: BaseException) -> BaseException:
    """Return a copy of an exception that was raised here."""
    try:
        another = copy(error)
    except Exception:  # it cannot be made of its `args`
        another = RpcError(f"{type(error).__module__}.{type(error).__qualname__}", seen=str(error))
    another.__cause__ = error.__cause__
    return another
