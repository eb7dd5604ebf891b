"""The callee's side: calls of other processes run here, and are answered.

A call is unpacked and run by a thread of the transport that has a slot. A call that makes a value
(`remote`) is answered when the value is stored; a call that fetches one (`to_here`) waits, without
a thread, until the value is there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import PeerLost, RpcError
from dure.rpc import failures
from dure.rpc.current import here
from dure.rpc.envelope import Envelope, GradientTag, Kind, Received, Work
from dure.rpc.functions import MARK, Later
from dure.rpc.message import Body, Packed
from dure.rpc.payloads import unknown
from dure.rpc.recording import served
from dure.rpc.values import Value
from dure.trace import logs
from dure.trace.spans import listeners

if TYPE_CHECKING:
    from dure.rpc.agent import Agent

__all__ = ["Callee"]

_log = logs.logger("rpc")
_Future = torch.futures.Future.__mro__[1]  # of C++: `then` returns it


class Callee:
    """Runs the calls of others in one process, and other code of the program.

    Args:
        agent: The process's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._busy: set[Callable[..., None]] = set()

    @property
    def num_running(self) -> int:
        """How many calls and callbacks run here, or wait for a thread."""
        return len(self._busy)

    def accept(self, received: Received) -> Work:
        """Return the work that runs a call."""
        work = partial(self._serve, received)
        if listeners:
            work = partial(served, self._agent.me.id, received.envelope, monotonic_ns(), work)
        self._busy.add(work)
        return partial(self._run, work)

    def as_work(self, work: Callable[[RpcError | None], None]) -> Work:
        """Return work for a thread of the transport that may run code of the program."""
        self._busy.add(work)
        return partial(self._run, work)

    def _run(
        self, work: Callable[[RpcError | None], None], refusal: RpcError | None = None
    ) -> None:
        agent = self._agent
        before = here.serves, here.agent
        here.serves, here.agent = True, agent
        try:
            work(refusal)
        finally:
            here.serves, here.agent = before
            self._busy.discard(work)
            if agent.directory.due:
                agent.flush()

    def _serve(self, received: Received, refusal: RpcError | None) -> None:
        """Run a call and answer it; or answer that there is no thread for it."""
        envelope = received.envelope
        try:
            if refusal is not None:
                raise refusal
            if envelope.kind == Kind.FETCH:
                self._fetch(received)
            elif not received.made:
                raise RpcError("this call was given up when a connection broke, and was not run")
            elif envelope.gradients is None:
                self._call(received)
            else:
                with self._agent.serving(envelope.gradients):
                    self._call(received)
        except BaseException as error:
            self._answer_error(envelope, error)

    def _call(self, received: Received) -> None:
        envelope, payloads = received.envelope, self._agent.payloads
        values, kwargs = payloads.unpack(received), {}
        if name := envelope.body.function:
            try:
                function = payloads.find_function(name)
            except (AttributeError, ImportError) as error:
                raise unknown(error) from error
        else:
            function, values, kwargs = values
        result = function(*values, **kwargs)
        del values, kwargs
        if hasattr(function, MARK):
            result = Later(result)
        if type(result) is not Later:
            self._answer(envelope, result)
        elif isinstance(result.future, _Future):
            self._answer_later(envelope, result)
        else:
            raise RpcError(
                "Functions decorated with @rpc.async_function must return a "
                f"torch.futures.Future object, but got {result.future!r}"
            )

    def _answer_later(self, envelope: Envelope, later: Later) -> None:
        def answer(done: torch.futures.Future[Any]) -> None:
            before, here.agent = here.agent, self._agent
            try:
                with self._agent.serving(envelope.gradients):
                    self._answer(envelope, done.value())
            except BaseException as error:
                self._answer_error(envelope, error)
            finally:
                here.agent = before
                self._busy.discard(answer)

        if later.counted:
            self._busy.add(answer)
        later.future.add_done_callback(answer)

    def _fetch(self, received: Received) -> None:
        """Answer a process that fetches a value, as soon as the value is there."""
        envelope, agent = received.envelope, self._agent
        ref, sender = envelope.make, envelope.sender
        assert ref is not None
        with agent.lock:
            if agent.directory.defer(sender, envelope.after, partial(self._serve, received)):
                return
            value = agent.values.find(ref, sender, partial(self._send_value, envelope))
            is_there = value is None or value.done
        if value is None:
            raise RpcError(
                "there is no such value any more, or the caller holds no reference to it",
                op="to_here",
            )
        if is_there:
            self._send_value(envelope, value)

    def _send_value(self, envelope: Envelope, value: Value) -> None:
        if value.error is not None:
            self._answer_error(envelope, value.error)
            return
        try:
            with self._agent.serving(envelope.gradients):
                self._answer(envelope, value.value)
        except BaseException as error:
            self._answer_error(envelope, error)

    def _answer(self, call: Envelope, result: Any) -> None:
        agent = self._agent
        if call.kind == Kind.MAKE:
            assert call.make is not None
            with agent.lock:
                agent.directory.made(call.sender, call.number)
            agent.values.set(call.make, result)
            return
        packed, tag = agent.payloads.pack_result(call, result), None
        if here.context is not None and agent.gradients is not None:
            what = f"the result of {call.gradients.what}" if call.gradients is not None else ""
            tag = agent.gradients.sending(call.sender, what, packed.sources)
        self._reply(call, Kind.ANSWER, packed, tag)

    def _answer_error(self, call: Envelope, error: BaseException) -> None:
        _log.warning("a call of worker %d failed here", call.sender, exc_info=error)
        if call.kind == Kind.MAKE:
            assert call.make is not None
            self._agent.values.set(call.make, None, error)
        packed = Packed(Body(failures.encode(error, self._agent.me)))
        self._reply(call, Kind.ERROR, packed, None)

    def _reply(self, call: Envelope, kind: Kind, packed: Packed, tag: GradientTag | None) -> None:
        peer = self._agent.directory.get(call.sender)
        try:
            if peer is not None:
                self._agent.send(peer, kind, call.number, packed, tag)
                return
        except PeerLost:
            pass
        self._agent.values.not_sent(packed.body.references)
