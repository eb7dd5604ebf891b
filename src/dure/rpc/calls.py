"""The table of a process's pending calls, with its limits on bytes and time.

**Bytes.** The bytes of unanswered calls to each process are counted, and a thread of the program
waits while there are too many. Threads that run calls do not wait: their calls let others end.

**Time.** All calls have deadlines, and few reach them: one timer, for the earliest deadline, checks
all pending calls when it expires.
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
from dure.rpc.message import MessageType, Transport, Waiter
from dure.rpc.references import RefId
from dure.rpc.timers import Timers

if TYPE_CHECKING:
    from dure.rpc.caller import Caller

__all__ = ["MOST_BYTES", "CallFuture", "PendingCall", "PendingCalls"]

MOST_BYTES = 1 << 30
"""The bytes of unanswered calls to one process above which threads of the program wait."""


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
    """

    kind: MessageType
    peer: Peer
    function: str
    seconds: float
    ticket: Waiter
    notify: Callable[[PendingCall], None] | None = None
    make: RefId | None = None
    counted: bool = True
    deadline: float = inf
    nbytes: int = 0
    noted: Any = None
    quick: bool = False
    awaited: bool = False
    number: int = 0
    outcome: Any = None

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

    def wait(self) -> Any:
        """Wait for the answer, and return the value.

        Raises:
            Exception: Raised by the callee, or by the way to it.
        """
        if not self.done():
            self.caller.wait_until_notified(self.call)
        return self.value() if self.done() else super().wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> Any:
        """Return a future of what a callback returns for this one; see torch."""
        self.call.quick = False
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Have a function called when the future is done; see torch."""
        self.call.quick = False
        super().add_done_callback(callback)

    def complete(self, call: PendingCall) -> None:
        """Set the outcome of the call; a waiting thread does not wait for callbacks."""
        try:
            value = self.caller.result(call)
        except BaseException as error:
            value = self.caller.error_maker(call) or partial(_another, error.with_traceback(None))
            self._set_unwrap_func(_raise)
        self.caller.complete_wait(call)  # the rest of the wait is torch's
        self.set_result(value)


class PendingCalls:
    """The table.

    Args:
        lock: The agent's lock; the methods take it, except those that say otherwise.
        transport: Carries the calls.
        timers: For deadlines.
        fail: Called with a call that has timed out, and the error.

    Attributes:
        made: How many calls were made, without RPC's own.
        closed: Whether no more calls may be made.
    """

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        transport: Transport,
        timers: Timers,
        fail: Callable[[PendingCall, Exception], None],
    ) -> None:
        self._lock, self._transport, self._timers, self._fail = lock, transport, timers, fail
        self._calls: dict[int, PendingCall] = {}
        self._number = self.made = 0
        self._sweep_at = inf
        self.closed = False

    def add(self, call: PendingCall, may_wait: bool) -> bool:
        """Put a call into the table, when few enough bytes are under way.

        Args:
            call: The call; its number is set.
            may_wait: Whether to wait while too many bytes are under way.

        Returns:
            False if the callee is gone.

        Raises:
            RpcError: Too many bytes were under way for the call's timeout.
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
            call.peer.nbytes -= call.nbytes
        if call.peer.blocked:
            self.unblock(call.peer)
        return call

    def unblock(self, peer: Peer) -> None:
        """Wake threads that wait until fewer bytes are under way."""
        with self._lock:
            blocked, peer.blocked = peer.blocked, []
        for ticket in blocked:
            self._transport.complete(ticket)

    def all(self, to: int | None = None) -> list[PendingCall]:
        """With the lock: return the pending calls, to one process or all."""
        return [call for call in self._calls.values() if to is None or call.peer.id == to]

    @property
    def nbytes(self) -> int:
        """The bytes under way."""
        return sum(call.nbytes for call in self._calls.values())

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
