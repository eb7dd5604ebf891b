"""The callee's side: calls of other processes run here, and are answered.

A call is unpacked and run by a thread of the transport that has a slot. A call that makes a value
(`remote`) is answered when the value is stored; a call that fetches one (`to_here`) waits for it
without a thread, and is answered by the thread that has received it if the value is small.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import PeerLost, RpcError
from dure.rpc import failures
from dure.rpc.calls import CppFuture
from dure.rpc.codec import Body, Packed
from dure.rpc.current import here
from dure.rpc.failures import malformed_message
from dure.rpc.functions import MARK, DeferredResult
from dure.rpc.memory import INLINE_BYTES
from dure.rpc.message import (
    ANSWER,
    ERROR,
    MAKE,
    GradientTag,
    MessageType,
    Received,
    RpcMessage,
    Work,
)
from dure.rpc.values import Value
from dure.trace import logs

if TYPE_CHECKING:
    from dure.rpc.agent import RpcAgent

__all__ = ["Callee"]

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})

_log = logs.logger("rpc")


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

    def as_work(self, work: Work) -> Work:
        """Return work for a thread of the transport that may run code of the program."""
        self._busy.add(work)
        return partial(self._run, work)

    def _run(self, work: Work) -> None:
        agent = self._agent
        before, here.agent = here.agent, agent
        try:
            work()
        finally:
            here.agent = before
            self._busy.discard(work)
            if agent.directory.due:
                agent.flush()

    def serve(self, received: Received) -> None:
        """Run a call and answer it."""
        message = received.message
        try:
            if message.gradients is None:
                self._call(received)
            else:
                with self._agent.gradients.serving(message.gradients):
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
        elif isinstance(result.future, CppFuture):
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
                with self._agent.gradients.serving(message.gradients):
                    self._answer(message, done.value())
            except BaseException as error:
                self._answer_error(message, error)
            finally:
                here.agent = before
                self._busy.discard(answer)

        if later.counted:
            self._busy.add(answer)
        later.future.add_done_callback(answer)

    def fetch(self, received: Received) -> Work | None:
        """Answer a process that fetches a value, when the value is made; quick, or returns work."""
        message, agent = received.message, self._agent
        ref = message.make
        if ref is None:
            error = TypeError("a FETCH message without a reference")
            self._answer_error(message, malformed_message(message.sender, error))
            return None
        with agent.lock:
            value = agent.values.find(ref)
            is_there = value is None or value.done
            if value is not None and not is_there:
                value.watchers.append(partial(self._send_value, message, value))
        if value is None:
            error = RpcError("the value was freed, or there is no such reference", op="to_here")
            self._answer_error(message, error)
        elif is_there and (value.failure or _is_small(value.value)):
            self._send_value(message, value)
        elif is_there:
            return self.as_work(partial(self._send_value, message, value))
        return None

    def _send_value(self, message: RpcMessage, value: Value) -> None:
        if value.failure:
            self._reply(message, ERROR, Packed(Body(value.failure)), None)
            return
        try:
            if message.gradients is here.context is None:
                self._answer(message, value.value)
                return
            with self._agent.gradients.serving(message.gradients):
                self._answer(message, value.value)
        except BaseException as error:
            self._answer_error(message, error)

    def _answer(self, call: RpcMessage, result: Any) -> None:
        agent = self._agent
        if call.kind == MAKE:
            assert call.make is not None
            agent.values.set(call.make, result)
            if call.sender == agent.me.id:  # others hear that their hold is confirmed
                with agent.step():
                    agent.caller.made(call.sender, call.make)
            return
        packed, tag = agent.payloads.pack_result(call, result), None
        if here.context is not None:
            what = f"the result of {call.gradients.what}" if call.gradients is not None else ""
            tag = agent.gradients.sending(call.sender, what, packed.sources)
        self._reply(call, ANSWER, packed, tag)

    def _answer_error(self, call: RpcMessage, error: BaseException) -> None:
        _log.warning("a call of worker %d failed here", call.sender, exc_info=error)
        failure = failures.encode(error, self._agent.me)
        self._reply(call, ERROR, Packed(Body(failure)), None)
        if call.kind == MAKE:
            assert call.make is not None
            self._agent.values.set(call.make, None, failure)

    def _reply(
        self, call: RpcMessage, kind: MessageType, packed: Packed, tag: GradientTag | None
    ) -> None:
        agent = self._agent
        peer, confirmed = agent.directory.get(call.sender), None
        if peer is None:
            agent.values.not_sent(packed.body.references)
            return
        if kind is ANSWER and call.make is not None and peer.confirmed.pop(call.make, False):
            confirmed = call.make  # a fetched value itself confirms the hold
        try:
            agent.send(peer, kind, call.number, packed, tag, confirmed)
        except BaseException as error:
            if confirmed is not None:
                with agent.lock:
                    agent.directory.confirm(peer.id, confirmed)
            if not isinstance(error, PeerLost):
                raise
            agent.values.not_sent(packed.body.references)


def _is_small(value: Any) -> bool:
    """Whether a value is packed in some microseconds, and without code of the program."""
    if type(value) is torch.Tensor:
        return value.layout is torch.strided and value.nbytes <= INLINE_BYTES
    if type(value) in _PLAIN:
        return not isinstance(value, str | bytes) or len(value) <= INLINE_BYTES
    return False
