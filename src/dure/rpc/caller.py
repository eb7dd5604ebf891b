"""The caller's side: calls of functions of other processes, and how they end.

A call has a number of the caller's. Its function and arguments are packed and sent; the answer has
the same number. Each call ends once, by the first event that removes it from the table (`calls`):
its answer, its timeout, a broken connection (the call may have run, and is not sent again), or the
death of the callee.
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
from dure.rpc.calls import Call, CallFuture, Calls
from dure.rpc.current import here
from dure.rpc.envelope import Completion, Kind, Received, Work
from dure.rpc.names import WorkerInfo
from dure.rpc.payloads import NOTHING, Args, Function, Kwargs, not_callable
from dure.rpc.recording import OPS
from dure.rpc.rref import RRef

if TYPE_CHECKING:
    from dure.rpc.agent import Agent
    from dure.rpc.references import RefId

__all__ = ["UNSET", "Caller", "To"]

To = str | int | WorkerInfo
"""A worker: its name, its id, or itself."""

UNSET = -1.0
"""A timeout that is not given: the default applies. 0 means none."""


class Caller:
    """Makes the calls of one agent.

    Args:
        agent: The process's agent.

    Attributes:
        calls: The calls under way.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent, self._transport = agent, agent.transport
        self._find_error = None if agent.allow is None else agent.allow.find_error
        self._lock, self._reach = agent.lock, agent.directory.reach
        self.calls = Calls(agent.lock, agent.transport, agent.timers, self.fail)

    # --- the three kinds of calls ------------------------------------------------------------

    def rpc_sync(
        self,
        to: To,
        func: Function,
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET,
    ) -> Any:
        """Call a function of another process (`api.rpc_sync`)."""
        return self.wait(self.call(to, (func, args, kwargs), timeout))

    def rpc_async(
        self,
        to: To,
        func: Function,
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET,
    ) -> CallFuture:
        """Start to call a function of another process (`api.rpc_async`)."""
        future = CallFuture()
        future.caller = self
        future.call = self.call(to, (func, args, kwargs), timeout, future.complete)
        future.call.quick = True
        return future

    def remote(
        self,
        to: To,
        func: Function,
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET,
    ) -> RRef[Any]:
        """Start to make a value at another process (`api.remote`)."""
        agent = self._agent
        worker = agent.find(to)
        if not callable(func):
            raise not_callable(func)
        ref = agent.values.begin(worker.id)
        rref = RRef[Any].received(agent, ref, worker.id, True)
        try:
            rref.made_by(self.call(worker, (func, args, kwargs), timeout, make=ref))
        except Exception:
            agent.values.not_sent((), ref)
            raise
        return rref

    def fetch(self, ref: RefId, owner: WorkerInfo, timeout: float) -> Any:
        """Return the value of a reference."""
        return self.wait(self.call(owner, None, timeout, make=ref))

    def ask(self, to: To, func: Function, args: tuple[Any, ...], timeout: float) -> Any:
        """Call a function of RPC's own, for which no shutdown waits.

        The calling thread does not receive messages while it waits, because it may wait for long
        and other threads can handle them.
        """
        done = threading.Event()
        call = self.call(to, (func, args, None), timeout, lambda _: done.set(), counted=False)
        done.wait()
        return self.result(call)

    # --- one call ----------------------------------------------------------------------------

    def call(
        self,
        to: To,
        what: tuple[Function, Args, Kwargs] | None,
        timeout: float = UNSET,
        notify: Callable[[Call], None] | None = None,
        make: RefId | None = None,
        counted: bool = True,
    ) -> Call:
        """Make a call.

        A thread of the program waits if too many bytes are under way. If the callee is gone, that
        is the outcome of the call, and not an error of this method.

        Args:
            to: The callee.
            what: Function, arguments and keyword arguments; None: fetch the value `make`.
            timeout: Seconds; `UNSET`, or 0 for none.
            notify: Called once when the call has ended.
            make: The reference of the value, which stays at the callee.
            counted: See `Call`.

        Raises:
            RpcError: The arguments cannot be sent.
        """
        agent = self._agent
        if self._lock._is_owned():  # pyright: ignore
            raise RpcError(
                "a finalizer made a call while its thread was at work for RPC",
                fix="Python runs `__del__` of cycles anywhere: let a thread make the call.",
            )
        peer = self._reach(to)
        try:
            seconds = agent.timeout if timeout < 0 else timeout
        except TypeError:
            raise _no_timeout(timeout) from None
        if not seconds >= 0:  # NaN
            raise _no_timeout(timeout)
        function, packed = "to_here", NOTHING
        kind = Kind.FETCH
        if what is not None:
            kind = Kind.CALL if make is None else Kind.MAKE
            packed = agent.payloads.pack_call(*what, peer.info)
            function = what[0].__qualname__ if packed.body.function else _name(what[0])
        if agent.values.gone:
            agent.values.forget_gone(except_for=peer.id)
        call = Call(
            kind=kind,
            peer=peer,
            function=function,
            ref=make,
            ticket=self._transport.ticket(),
            seconds=seconds,
            deadline=monotonic() + seconds if seconds > 0 else inf,
            nbytes=packed.nbytes,
            notify=notify,
            counted=counted,
            noted=agent.recorder.begin(OPS[kind], None, peer.id, function, notify is not None),
        )
        tag = None
        try:
            if here.context is not None and agent.gradients is not None:
                tag = agent.gradients.sending(peer.id, call.what, packed.sources)
            is_under_way = self.calls.add(call, not here.serves)
        except BaseException:  # Ctrl-C while it waits until fewer bytes are under way, too
            agent.values.not_sent(packed.body.references)
            raise
        if not is_under_way:
            agent.values.not_sent(packed.body.references)
            self._end_at_once(call, agent.lost(peer.id) or _closed())
            return call
        devices = agent.payloads.devices_back(peer.info) if agent.device_maps else None
        try:
            agent.send(peer, kind, call.number, packed, tag, make, devices)
        except PeerLost as error:
            self.fail(call, agent.lost(peer.id) or error)
        except BaseException:
            if self.calls.take(call.number) is not None:
                agent.values.not_sent(packed.body.references)
            raise
        return call

    def wait(self, call: Call) -> Any:
        """Wait until a call has ended, and return its value; the thread receives messages.

        Raises:
            Exception: Raised by the callee, or by the way to it.
        """
        self._transport.wait(call.ticket)
        return self.result(call)

    def wait_until_notified(self, call: Call) -> None:
        """Wait until `notify` of a call has been called.

        This thread calls it itself, unless that runs callbacks of the program: these could wait for
        something that this very thread is to do.
        """
        call.awaited = call.quick
        try:
            self._transport.wait(call.ticket)
            if call.quick:
                self._notify(call)
        finally:
            call.awaited = False
            if call.notify is not None and call.outcome is not None:
                self._agent.submit(self._notification(call))

    def result(self, call: Call) -> Any:
        """Return the value that a call has ended with.

        Raises:
            Exception: Raised by the callee, or by the way to it.
        """
        outcome = call.outcome or _closed()
        if type(outcome) is not Received:
            raise outcome
        body = outcome.envelope.body
        if outcome.envelope.kind == Kind.ERROR:
            raise failures.decode(body.pickled, self._find_error)
        if not (body.pickled or body.inline or body.tensors or body.references):
            return None
        return self._agent.payloads.unpack(outcome)[0]

    def error_maker(self, call: Call) -> Callable[[], Exception] | None:
        """Return a function that makes the exception of the callee, if it answered with one."""
        outcome = call.outcome
        if type(outcome) is Received and outcome.envelope.kind == Kind.ERROR:
            return partial(failures.decode, outcome.envelope.body.pickled, self._find_error)
        return None

    def complete_wait(self, call: Call) -> None:
        """Let the thread that waits for a call continue."""
        self._transport.complete(call.ticket)

    def when_done(self, call: Call, notify: Callable[[Call], None]) -> None:
        """Call a function when a call has ended that no thread waits for."""
        call.notify = notify
        if call.outcome is not None:
            self._notify(call)

    # --- how calls end -----------------------------------------------------------------------

    def answered(self, received: Received) -> Work | None:
        """End the call that a message answers; return the work for a thread of the transport."""
        envelope = received.envelope
        call = self.calls.take(envelope.number, envelope.sender)
        return None if call is None else self._end(call, received)

    def made(self, number: int, received: Received) -> None:
        """End a call whose value was made, without a message of its own."""
        sender = received.envelope.sender
        if (call := self.calls.take(number, sender)) is not None:
            self._end_at_once(call, Received.empty_answer(sender))

    def fail(self, call: Call, error: Exception) -> None:
        """End a call without an answer, if it has not ended."""
        if self.calls.take(call.number) is not None:
            self._end_at_once(call, error)

    def never_made(self, ref: RefId) -> None:
        """With the lock: end calls that fetch a value that was never made."""
        for call in self.calls.all():
            if call.ref == ref and call.kind == Kind.FETCH:
                error = RpcError("the value was never made", op=call.what)
                self._agent.todo.append(partial(self.fail, call, error))

    def close(self) -> None:
        """Fail the calls under way."""
        with self._lock:
            calls = self.calls.all()
        for call in calls:
            self.fail(call, _closed())

    def _end(self, call: Call, outcome: Received | Exception) -> Work | None:
        """End a call that was removed from the table; return the work for a thread."""
        call.outcome = outcome
        error = None if type(outcome) is Received else outcome
        self._agent.recorder.end(call.noted, error)  # pyright: ignore[reportArgumentType]
        if call.notify is None or call.awaited:
            self._transport.complete(call.ticket)
            return None
        return self._notification(call)

    def _end_at_once(self, call: Call, outcome: Received | Exception) -> None:
        work = self._end(call, outcome)
        if work is not None:
            self._agent.submit(work)

    def _notification(self, call: Call) -> Work:
        return Completion(self._agent.callee.as_work(lambda _: self._notify(call)))

    def _notify(self, call: Call) -> None:
        with self._lock:
            notify, call.notify = call.notify, None
        if notify is not None:
            notify(call)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _no_timeout(timeout: object) -> UsageError:
    return UsageError(
        "timeout must be a number of seconds",
        op="rpc",
        seen=repr(timeout),
        fix="Pass 0 for none; leave it out for the default.",
    )


def _closed() -> RpcError:
    return RpcError("RPC was shut down before this call was answered")
