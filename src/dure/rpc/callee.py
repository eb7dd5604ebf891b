"""The callee's side: calls of other processes run here, and are answered.

A call is unpacked and run by a thread of the transport that has a slot. A call that makes a value
(`remote`) is answered when the value is stored; a call that fetches one (`to_here`) waits for it
without a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import PeerLost, RpcError
from dure.rpc import failures
from dure.rpc.codec import Body, Packed
from dure.rpc.current import here
from dure.rpc.failures import malformed_message
from dure.rpc.functions import MARK, DeferredResult
from dure.rpc.message import GradientTag, MessageType, Received, RpcMessage, Work
from dure.rpc.recording import served
from dure.rpc.values import Value
from dure.trace import logs
from dure.trace.spans import listeners

if TYPE_CHECKING:
    from dure.rpc.agent import RpcAgent

__all__ = ["Callee"]

_log = logs.logger("rpc")
_Future = torch.futures.Future.__mro__[1]  # the C++ class, which `then` returns


class Callee:
    """Runs the calls of others in one process, and other code of the program.

    Args:
        agent: The process's agent.
    """

    def __init__(self, agent: RpcAgent) -> None:
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
            work = partial(served, self._agent.me.id, received.message, monotonic_ns(), work)
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
        message = received.message
        try:
            if refusal is not None:
                raise refusal
            if message.kind == MessageType.FETCH:
                self._fetch(received)
            elif not received.made:
                raise RpcError("this call was given up when a connection broke, and was not run")
            elif message.gradients is None:
                self._call(received)
            else:
                with self._agent.serving(message.gradients):
                    self._call(received)
        except BaseException as error:
            self._answer_error(message, error)

    def _call(self, received: Received) -> None:
        message = received.message
        function, args, kwargs = self._agent.payloads.unpack_call(received)
        result = function(*args, **kwargs)
        del args, kwargs
        if hasattr(function, MARK):
            result = DeferredResult(result)
        if type(result) is not DeferredResult:
            self._answer(message, result)
        elif isinstance(result.future, _Future):
            self._answer_later(message, result)
        else:
            raise RpcError(
                "Functions decorated with @rpc.async_function must return a "
                f"torch.futures.Future object, but got {result.future!r}"
            )

    def _answer_later(self, message: RpcMessage, later: DeferredResult) -> None:
        def answer(done: torch.futures.Future[Any]) -> None:
            before, here.agent = here.agent, self._agent
            try:
                with self._agent.serving(message.gradients):
                    self._answer(message, done.value())
            except BaseException as error:
                self._answer_error(message, error)
            finally:
                here.agent = before
                self._busy.discard(answer)

        if later.counted:
            self._busy.add(answer)
        later.future.add_done_callback(answer)

    def _fetch(self, received: Received) -> None:
        """Answer a process that fetches a value, when the value is made."""
        message, agent = received.message, self._agent
        ref, sender = message.make, message.sender
        if ref is None:
            raise malformed_message(sender, TypeError("a FETCH message without a reference"))
        with agent.lock:
            if agent.directory.defer(sender, message.after, partial(self._serve, received)):
                return
            value = agent.values.find(ref, sender, partial(self._send_value, message))
            is_there = value is None or value.done
        if value is None:
            raise RpcError(
                "the value was freed, or the caller holds no reference to it",
                op="to_here",
            )
        if is_there:
            self._send_value(message, value)

    def _send_value(self, message: RpcMessage, value: Value) -> None:
        if value.error is not None:
            self._answer_error(message, value.error)
            return
        try:
            with self._agent.serving(message.gradients):
                self._answer(message, value.value)
        except BaseException as error:
            self._answer_error(message, error)

    def _answer(self, call: RpcMessage, result: Any) -> None:
        agent = self._agent
        if call.kind == MessageType.MAKE:
            assert call.make is not None
            with agent.lock:
                agent.directory.made(call.sender, call.number)
            agent.values.set(call.make, result)
            return
        packed, tag = agent.payloads.pack_result(call, result), None
        if here.context is not None:
            what = f"the result of {call.gradients.what}" if call.gradients is not None else ""
            tag = agent.gradients.sending(call.sender, what, packed.sources)
        self._reply(call, MessageType.ANSWER, packed, tag)

    def _answer_error(self, call: RpcMessage, error: BaseException) -> None:
        _log.warning("a call of worker %d failed here", call.sender, exc_info=error)
        if call.kind == MessageType.MAKE:
            assert call.make is not None
            self._agent.values.set(call.make, None, error)
        packed = Packed(Body(failures.encode(error, self._agent.me)))
        self._reply(call, MessageType.ERROR, packed, None)

    def _reply(
        self, call: RpcMessage, kind: MessageType, packed: Packed, tag: GradientTag | None
    ) -> None:
        peer = self._agent.directory.get(call.sender)
        try:
            if peer is not None:
                self._agent.send(peer, kind, call.number, packed, tag)
                return
        except PeerLost:
            pass
        self._agent.values.not_sent(packed.body.references)
