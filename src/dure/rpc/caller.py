"""The caller's side: calls of functions of other processes, and how they end.

A call has a number that the caller chooses. Its function and arguments are packed and sent; the
answer has the same number. Each call ends once, by the first event that removes it from the table
(`calls`): its answer, its timeout, or the end of the callee (the call may have run).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any

from dure.errors import PeerLost, RpcError, UsageError
from dure.rpc import failures
from dure.rpc.calls import CallFuture, PendingCall, PendingCalls, number_of
from dure.rpc.codec import Packed
from dure.rpc.current import here
from dure.rpc.directory import Peer
from dure.rpc.message import (
    ANSWER,
    CALL,
    ERROR,
    FETCH,
    MAKE,
    Completion,
    FutureCompletion,
    Received,
    RpcMessage,
    Work,
)
from dure.rpc.names import WorkerInfo
from dure.rpc.payloads import NOTHING, Args, Function, Kwargs, not_callable
from dure.rpc.recording import OPS
from dure.rpc.rref import RRef

if TYPE_CHECKING:
    from dure.rpc.agent import RpcAgent
    from dure.rpc.references import RefId

__all__ = ["UNSET", "Caller", "To"]

To = str | int | WorkerInfo
"""A worker: its name, its id, or itself."""

_MADE = Received(RpcMessage(ANSWER, -1))
"""The outcome of a call that has made a value."""

_SOON_S = 0.001
"""How long a future may stay incomplete after its answer has arrived, if no thread waits for it."""

UNSET = -1.0
"""A timeout that is not given: the default applies. 0 means none."""


class Caller:
    """Makes the calls of one agent.

    Args:
        agent: The process's agent.

    Attributes:
        calls: The calls under way.
        uncompleted: Those that have ended, whose futures without callbacks do not show it yet.
        transport: The agent's.
    """

    def __init__(self, agent: RpcAgent) -> None:
        self._agent, self.transport = agent, agent.transport
        self._find_error = None if agent.allow is None else agent.allow.find_error
        self._lock, self._reach = agent.lock, agent.directory.reach
        self.calls = PendingCalls(agent.lock, agent.timers, self.fail)
        self.uncompleted: set[PendingCall] = set()
        self._completes_soon = False

    # --- the three kinds of calls ------------------------------------------------------------

    def rpc_sync(self, to: To, *rest: Any) -> Any:
        """Call a function and return its result (`api.rpc_sync`); arguments as for `call`."""
        return self.wait(self.call(to, *rest))

    def rpc_async(self, to: To, *rest: Any) -> CallFuture:
        """Start a call and return its future (`api.rpc_async`); arguments as for `call`."""
        future = CallFuture()
        future.caller = self
        future.call = self.call(to, *rest, notify=future.complete)
        future.call.quick = True
        return future

    def remote(self, to: To, func: Function, *rest: Any) -> RRef[Any]:
        """Start to make a value at another process (`api.remote`); arguments as for `call`."""
        agent = self._agent
        worker = agent.find(to)
        if not callable(func):
            raise not_callable(func)
        ref = agent.values.begin(worker.id)
        rref = RRef.received(agent, ref, worker.id, True)
        try:
            rref.made_by(self.call(worker, func, *rest, make=ref))
        except Exception:
            agent.values.not_sent((), ref)
            raise
        return rref

    def fetch(self, ref: RefId, owner: WorkerInfo, timeout: float) -> Any:
        """Return the value of a reference."""
        peer, seconds = self._callee(owner, timeout)
        ticket = self.transport.ticket()
        call = PendingCall(FETCH, peer, "to_here", seconds, ticket, make=ref)
        self._send(call, NOTHING)
        return self.wait(call)

    def ask(self, to: To, func: Function, args: tuple[Any, ...], timeout: float) -> Any:
        """Call a function of RPC's own, for which no shutdown waits.

        The calling thread does not receive messages while it waits, because it may wait for long
        and other threads can handle them.
        """
        done = threading.Event()
        set_done: Callable[[PendingCall], None] = lambda _: done.set()  # noqa: E731
        call = self.call(to, func, args, None, timeout, notify=set_done, counted=False)
        done.wait()
        return self.result(call)

    # --- one call ----------------------------------------------------------------------------

    def call(
        self,
        to: To,
        func: Function,
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET,
        *,
        notify: Callable[[PendingCall], None] | None = None,
        make: RefId | None = None,
        counted: bool = True,
    ) -> PendingCall:
        """Start a call.

        If the callee is gone, that is the outcome of the call, and not an error of this method.

        Args:
            to: The callee.
            func: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
            timeout: Seconds; `UNSET`, or 0 for none.
            notify: Called once when the call has ended.
            make: The reference under which the callee keeps the result.
            counted: See `PendingCall`.

        Raises:
            UsageError: An argument has the wrong type.
            RpcError: The arguments cannot be sent.
        """
        peer, seconds = self._callee(to, timeout)
        packed = self._agent.payloads.pack_call(func, args, kwargs, peer.info)
        name = func.__qualname__ if packed.body.function else _name(func)
        kind = CALL if make is None else MAKE
        ticket = self.transport.ticket()
        call = PendingCall(kind, peer, name, seconds, ticket, notify, make, counted)
        self._send(call, packed)
        return call

    def _callee(self, to: To, timeout: float) -> tuple[Peer, float]:
        """Return the callee of a call that starts here, and the call's timeout."""
        if self._lock._is_owned():  # pyright: ignore
            raise RpcError(
                "a finalizer made a call while its thread was at work for RPC",
                fix="Python runs `__del__` of cycles anywhere: let a thread make the call.",
            )
        peer = self._reach(to)
        try:
            seconds = self._agent.timeout if timeout < 0 else timeout
        except TypeError:
            raise _not_a_timeout(timeout) from None
        if not seconds >= 0 or timeout is True or timeout is False:  # NaN, or a bool
            raise _not_a_timeout(timeout)
        return peer, seconds

    def _send(self, call: PendingCall, packed: Packed) -> None:
        """Put a call into the table, and send it."""
        agent, peer = self._agent, call.peer
        if agent.values.gone:
            agent.values.forget_gone(except_for=peer.id)
        if call.seconds > 0:
            call.deadline = monotonic() + call.seconds
        call.noted = agent.recorder.begin(
            OPS[call.kind], None, peer.id, call.function, call.notify is not None
        )
        tag = None
        try:
            if here.context is not None:
                tag = agent.gradients.sending(peer.id, call.what, packed.sources)
            is_under_way = self.calls.add(call)
        except BaseException:
            agent.values.not_sent(packed.body.references)
            raise
        if not is_under_way:
            agent.values.not_sent(packed.body.references)
            self._end_at_once(call, agent.lost(peer.id) or _closed())
            return
        patient = call.notify is None and call.kind is not MAKE  # this thread will wait
        try:
            call.asked = agent.send(
                peer, call.kind, call.number, packed, tag, call.make, patient=patient
            )
        except PeerLost as error:
            self.fail(call, agent.lost(peer.id) or error)
        except BaseException:
            if self.calls.take(call.number) is not None:
                agent.values.not_sent(packed.body.references)
            raise

    def wait(self, call: PendingCall) -> Any:
        """Wait until a call has ended, and return its value; the thread receives messages.

        Raises:
            Exception: Raised by the callee, or by the way to it.
        """
        try:
            self.transport.wait(call.ticket, inf, call.asked)
        finally:
            if call.asked is not None and type(call.outcome) is not Received:
                call.asked.remind()  # the callee may not have read the call
        return self.result(call)

    def wait_until_notified(self, call: PendingCall) -> None:
        """Wait until `notify` of a call has been called.

        This thread calls it, unless it runs callbacks of the program: these could wait for
        something that this very thread is to do.
        """
        call.awaited = call.quick
        try:
            self.transport.wait(call.ticket)
            if call.quick:
                self._notify(call)
        finally:
            call.awaited = False
            if call.notify is not None and call.outcome is not None:
                self._agent.submit(self._notification(call))

    def result(self, call: PendingCall) -> Any:
        """Return the value that a call has ended with.

        Raises:
            Exception: Raised by the callee, or by the way to it.
        """
        outcome = call.outcome or _closed()
        if type(outcome) is not Received:
            raise outcome
        if outcome.message.kind == ERROR:
            raise failures.decode(*self._failure(outcome))
        values = self._agent.payloads.unpack(outcome)
        return values[0] if values else None

    def error_maker(self, call: PendingCall) -> Callable[[], Exception] | None:
        """Return a function that makes the exception of the callee, if it answered with one."""
        outcome = call.outcome
        if type(outcome) is Received and outcome.message.kind == ERROR:
            return partial(failures.decode, *self._failure(outcome))
        return None

    def _failure(self, received: Received) -> tuple[bytes, int, Any]:
        """Return the arguments of `failures.decode`."""
        return received.message.body.pickled, received.message.sender, self._find_error

    def when_done(self, call: PendingCall, notify: Callable[[PendingCall], None]) -> None:
        """Call a function when a call has ended that no thread waits for."""
        call.notify = notify
        if call.outcome is not None:
            self._notify(call)

    # --- how calls end -----------------------------------------------------------------------

    def answered(self, received: Received) -> Work | None:
        """End the call that a message answers; return work for a thread of the transport."""
        message = received.message
        call = self.calls.take(message.number, message.sender)
        return None if call is None else self._end(call, received)

    def made(self, sender: int, ref: RefId) -> None:
        """In a `step`: end the call that makes a value, which it has, if it has not ended."""
        call = self.calls.take(number_of(ref), sender)
        work = None if call is None else self._end(call, _MADE)
        if work is not None:
            self._agent.todo.append(partial(self._agent.submit, work))

    def fail(self, call: PendingCall, error: Exception) -> None:
        """End a call without an answer, if it has not ended."""
        if self.calls.take(call.number) is not None:
            self._end_at_once(call, error)

    def never_made(self, ref: RefId) -> None:
        """With the lock: end calls that fetch a value that was never made."""
        for call in self.calls.all():
            if call.make == ref and call.kind == FETCH:
                error = RpcError("the value was never made", op=call.what)
                self._agent.todo.append(partial(self.fail, call, error))

    def close(self) -> None:
        """Fail the calls under way."""
        with self._lock:
            calls = self.calls.all()
        for call in calls:
            self.fail(call, _closed())
        self._complete_all()

    def _end(self, call: PendingCall, outcome: Received | Exception) -> Work | None:
        """End a call that was removed from the table; return the work for a thread."""
        call.outcome = outcome
        error = None if type(outcome) is Received else outcome
        self._agent.recorder.end(call.noted, error)  # pyright: ignore[reportArgumentType]
        if call.notify is None or call.awaited:
            self.transport.complete(call.ticket)
            return None
        if not call.quick:
            return self._notification(call)
        self.uncompleted.add(call)
        self.transport.complete(call.ticket)
        return FutureCompletion(self._complete, call)

    def _complete(self, call: PendingCall) -> None:
        self._notification(call)()

    def complete_soon(self) -> None:
        """Complete the `uncompleted` futures soon, unless the program waits for them before that.

        A thread that waits for one future receives the answers to others. Waking another thread for
        each answer would take longer than the program needs to reach its next wait.
        """
        if not self._completes_soon:
            self._completes_soon = True
            self._agent.timers.at(monotonic() + _SOON_S, self._complete_all)
        if self._agent.closed:  # the timer may never expire
            self._complete_all()

    def complete_now(self, call: PendingCall) -> None:
        """Have the future of a call completed, if it has ended."""
        if call in self.uncompleted:
            self._agent.submit(self._notification(call))

    def _complete_all(self) -> None:
        self._completes_soon = False
        for call in self.uncompleted.copy():
            self.complete_now(call)

    def _end_at_once(self, call: PendingCall, outcome: Received | Exception) -> None:
        work = self._end(call, outcome)
        if work is not None:
            self._agent.submit(work)

    def _notification(self, call: PendingCall) -> Work:
        return Completion(self._agent.callee.as_work(partial(self._notify, call)))

    def _notify(self, call: PendingCall) -> None:
        with self._lock:
            notify, call.notify = call.notify, None
        if notify is not None:
            notify(call)
            self.uncompleted.discard(call)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _not_a_timeout(timeout: object) -> UsageError:
    return UsageError(
        "timeout must be a number of seconds",
        op="rpc",
        seen=repr(timeout),
        fix="Pass 0 for none; leave it out for the default.",
    )


def _closed() -> RpcError:
    return RpcError("RPC was shut down before this call was answered")
