"""The contexts of one process, and backward passes through them.

**Forward.** While a thread is in a context (`inside`), the agent tags each message that it sends
(`sending`): the receiver then knows of the context, too (`receiving`), and serves the call in it,
so that the calls made there are tagged again. What needs gradients is noted on both sides
(`context`).

**Backward.** Gradients go back to where tensors came from. A *step* is what one message with
gradients (at the beginning: the call of `backward`) sets off in one process: it runs what can be
run, and sends on what that gives. A step is answered when all messages that it has sent are
answered. So when the first one is complete, nothing is under way any more, on any process. Each
answer says how far the processes below it have come; a process may be in several of them, and its
furthest progress counts. If a process has not had all gradients then, some call's result got none,
and the pass has failed.

**Failures.** An error, or the death of a process that owes an answer, completes a step at once and
goes up in its answer. The first process raises it, and tells all that know the context that the
pass has ended (`_End`): they forget what they have of it, and drop what still comes for it. A
context is released in the same way, and also when the process that made it dies.

All messages of this file are reliable (`links`): they arrive, or their receiver is dead.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from dure.errors import DureError, PeerLost, RpcError
from dure.rpc import failures
from dure.rpc.autograd.context import (
    Context,
    MessageId,
    Outgoing,
    PassId,
    Progress,
    no_gradients,
)
from dure.rpc.autograd.graph import follow_hooks
from dure.rpc.envelope import GradientTag, Waiter
from dure.rpc.message import TensorRow, pack, rebuild, unpack
from dure.rpc.names import WorkerInfo

if TYPE_CHECKING:
    from dure.rpc.agent import Agent

__all__ = ["Carrier", "Contexts", "attach", "current", "inside", "set_current"]

_ID_BITS = 48
"""A context's number: the process that made it, and in so many bits a number of that process."""

_KEPT = 10_000
"""How many contexts that were released are remembered, for messages that come late."""

_TOPIC = 1
"""Of these messages, among the reliable ones."""

_here = threading.local()


def attach(agent: Agent) -> None:
    """Let an agent know of contexts; before messages come."""
    contexts = agent.gradients = Contexts(agent.me, _AgentCarrier(agent))
    agent.on(_TOPIC, contexts.receive)


def current() -> int | None:
    """Return the context that the calling thread is in."""
    return getattr(_here, "number", None)


def set_current(number: int | None) -> None:
    """Say which context the calling thread is in."""
    _here.number = number


@contextmanager
def inside(number: int | None) -> Iterator[None]:
    """While within, the calling thread is in a context, or in none."""
    before = current()
    _here.number = number
    try:
        yield
    finally:
        _here.number = before


class Carrier(Protocol):
    """Carries what this file sends, and knows threads."""

    def tell(self, to: int, body: bytes) -> None:
        """Send a reliable message to another process, or to this one.

        Raises:
            PeerLost: The process is gone.
        """
        ...

    def submit(self, work: Callable[[], None]) -> None:
        """Have something run by a thread of RPC's."""
        ...

    def ticket(self) -> Waiter:
        """Return something to wait for."""
        ...

    def complete(self, ticket: Waiter) -> None:
        """Say that it is there."""
        ...

    def wait(self, ticket: Waiter) -> None:
        """Wait for it; the thread receives messages meanwhile."""
        ...


class _AgentCarrier:
    """The agent's way to do that."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.submit = agent.submit
        self.ticket, self.complete = agent.transport.ticket, agent.transport.complete

    def tell(self, to: int, body: bytes) -> None:
        self._agent.tell(to, _TOPIC, body)

    def wait(self, ticket: Waiter) -> None:
        while not ticket.done:
            self._agent.transport.wait(ticket, 60.0)


class _Gradients(msgspec.Struct, array_like=True, frozen=True, tag=0):
    context: int
    backward: PassId
    number: int  # of the message, for the answer
    message: MessageId  # that has brought the tensors
    retain_graph: bool
    pickled: bytes
    tensors: list[TensorRow]
    memories: list[memoryview]


class _Answer(msgspec.Struct, array_like=True, frozen=True, tag=1):
    number: int
    progress: dict[int, Progress]
    node: int = -1  # where it has failed
    error: bytes = b""


class _End(msgspec.Struct, array_like=True, frozen=True, tag=2):
    context: int
    backward: PassId | None  # None: the context is released


_decoder = msgspec.msgpack.Decoder(_Gradients | _Answer | _End)


@dataclass(slots=True, eq=False)
class _Step:
    """What a message with gradients, or `backward`, has set off here.

    Args:
        context: The context's number.
        backward: The pass.
        tell: Called with it when it is complete.
        open: How many messages that it has sent are not answered; one more while it runs.
        progress: Of the processes below it.
        failed: Where, and with which error.
    """

    context: int
    backward: PassId
    tell: Callable[[_Step], None]
    open: int = 1
    progress: dict[int, Progress] = field(default_factory=dict[int, Progress])
    failed: tuple[int, bytes] | None = None

    def learn(self, progress: dict[int, Progress]) -> None:
        for worker, new in progress.items():
            old = self.progress.get(worker)
            if old is None or new[0] > old[0]:
                self.progress[worker] = new


class Contexts:
    """The contexts of one process.

    Args:
        me: This process.
        carrier: Who carries its messages.

    Threads: any.
    """

    def __init__(self, me: WorkerInfo, carrier: Carrier) -> None:
        follow_hooks()
        self._me, self._carrier = me, carrier
        self._contexts: dict[int, Context] = {}
        self._released: deque[int] = deque(maxlen=_KEPT)
        self._numbers = itertools.count(1)  # of contexts, passes and messages
        self._steps: dict[int, tuple[_Step, int]] = {}  # by message: the step, the receiver
        self._lock = threading.Lock()

    @property
    def counts(self) -> tuple[int, int]:
        """How many contexts there are, and through how many of them a pass is under way."""
        with self._lock:
            running = {context.number for context in self._contexts.values() if context.is_running}
            running |= {step.context for step, _ in self._steps.values()}
            return len(self._contexts), len(running)

    @property
    def max_number(self) -> int:
        """The largest number that a context of this process can have."""
        return (self._me.id << _ID_BITS) + (1 << _ID_BITS) - 1

    # --- contexts ----------------------------------------------------------------------------

    def new(self) -> Context:
        """Make a context."""
        number = (self._me.id << _ID_BITS) + next(self._numbers)
        with self._lock:
            context = self._contexts[number] = Context(number, self._me.id)
        return context

    def find(self, number: int) -> Context:
        """Return a context that is known here.

        Raises:
            RpcError: There is none of this number.
        """
        context = self._contexts.get(number)
        if context is None:
            raise RpcError(
                f"Could not find autograd context with id: {number}",
                fix="Contexts end with their `with` block, or with the process that made them.",
            )
        return context

    def release(self, number: int) -> None:
        """Forget a context, here and on all processes that know it; none is an error."""
        with self._lock:
            context = self._contexts.pop(number, None)
            if context is None:
                return
            self._released.append(number)
            steps = self._forget(lambda step: step.context == number)
        for step in steps:
            self._fail(step, self._me.id, self._encoded(_released(number)))
        self._tell(context, _End(number, None))

    # --- forward -----------------------------------------------------------------------------

    def sending(self, to: int, what: str, tensors: Sequence[torch.Tensor]) -> GradientTag | None:
        """Take note of a message that this thread sends; return its tag if it is in a context.

        Args:
            to: Who receives it.
            what: The call, for people.
            tensors: All tensors of the message.
        """
        number = current()
        context = None if number is None else self._contexts.get(number)
        if context is None:
            return None
        message = (self._me.id, next(self._numbers))
        grads = tensors if torch.is_grad_enabled() else ()
        return GradientTag(context.number, message, context.sends(message, grads, to, what), what)

    def receiving(
        self, sender: int, tag: GradientTag, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the tensors of a message with their places in the graph.

        Args:
            sender: Who sent it.
            tag: Its tag.
            tensors: All tensors of the message.
        """
        context = self._known(tag.context)
        if context is None:
            return tensors
        context.workers.add(sender)
        if not tag.needing:
            return tensors
        return context.receives(tag.message, tensors, sender, tag.what)

    def serving(self, tag: GradientTag) -> AbstractContextManager[None]:
        """Return what a call that came with the tag runs in, its answer included."""
        context = self._known(tag.context)  # also where a message has nothing to unpack
        if context is not None:
            context.workers.add(tag.message[0])
        return inside(tag.context)

    def _known(self, number: int) -> Context | None:
        """Return a context that another process has spoken of; None: it is released."""
        with self._lock:
            context = self._contexts.get(number)
            mine = number >> _ID_BITS == self._me.id
            if context is None and not mine and number not in self._released:
                context = self._contexts[number] = Context(number, self._me.id)
            return context

    # --- backward ----------------------------------------------------------------------------

    def backward(self, number: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Run a backward pass that begins here, to its end; see `api.backward`."""
        context = self.find(number)
        ticket = self._carrier.ticket()
        this = self._me.id, next(self._numbers)
        step = _Step(number, this, lambda _: self._carrier.complete(ticket))
        try:
            with inside(None):
                outgoing, progress = context.begin(step.backward, roots, retain_graph)
            step.learn({self._me.id: progress})
            self._send(step, outgoing, retain_graph)
            self._carrier.wait(ticket)
            if step.failed is not None:
                raise _raised(*step.failed)
            missing = [text for _, text in step.progress.values() if text]
            if missing:
                raise no_gradients("; ".join(missing))
        except BaseException:
            self._end(number, step.backward)
            raise

    def receive(self, sender: int, body: bytes) -> None:
        """Take a message; returns quickly.

        Args:
            sender: Who sent it.
            body: What its `Carrier.tell` was given.
        """
        message = _decoder.decode(body)
        if isinstance(message, _Gradients):
            self._carrier.submit(partial(self._arrive, sender, message))
        elif isinstance(message, _Answer):
            with self._lock:
                step, _ = self._steps.pop(message.number, (None, None))
                if step is not None:
                    step.learn(message.progress)
            if step is not None and message.error:
                self._fail(step, message.node, message.error)
            elif step is not None:
                self._count_down(step)
        elif message.backward is not None:
            self._end(message.context, message.backward)
        else:
            self.release(message.context)

    def died(self, worker: int, error: PeerLost) -> None:
        """Take note of a process that is gone, after all that came from it."""
        with self._lock:
            steps = self._forget(lambda step: False, worker)
            orphans = [number for number in self._contexts if number >> _ID_BITS == worker]
        for context in list(self._contexts.values()):
            context.workers.discard(worker)
        for step in steps:
            self._fail(step, self._me.id, self._encoded(error))
        for number in orphans:
            self.release(number)

    # --- steps -------------------------------------------------------------------------------

    def _arrive(self, sender: int, got: _Gradients) -> None:
        """Run the step that gradients set off."""
        step = _Step(got.context, got.backward, partial(self._answer, sender, got.number))
        try:
            memories = [_memory(data) for data in got.memories]
            tensors = rebuild(got.tensors, memories)
            gradients = unpack(got.pickled, tensors)
            context = self.find(got.context)
            with inside(None):
                outgoing, progress = context.arrive(
                    got.backward, got.message, gradients, got.retain_graph
                )
            step.learn({self._me.id: progress})
            self._send(step, outgoing, got.retain_graph)
        except Exception as error:
            self._fail(step, self._me.id, self._encoded(error))

    def _send(self, step: _Step, outgoing: list[Outgoing], retain_graph: bool) -> None:
        for out in outgoing:
            packed = pack(out.gradients, out.to)
            number = next(self._numbers)
            body = _Gradients(
                step.context,
                step.backward,
                number,
                out.message,
                retain_graph,
                packed.pickled,
                packed.tensors,
                [_bytes(memory) for memory in packed.memories],
            )
            with self._lock:
                step.open += 1
                self._steps[number] = step, out.to
            self._carrier.tell(out.to, msgspec.msgpack.encode(body))
        self._count_down(step)

    def _count_down(self, step: _Step) -> None:
        with self._lock:
            step.open -= 1
            if step.open or step.failed is not None:
                return
        step.tell(step)

    def _fail(self, step: _Step, node: int, error: bytes) -> None:
        with self._lock:
            if step.failed is not None or not step.open:
                return
            step.failed = node, error
        step.tell(step)

    def _answer(self, to: int, number: int, step: _Step) -> None:
        node, error = step.failed or (-1, b"")
        answer = msgspec.msgpack.encode(_Answer(number, step.progress, node, error))
        with suppress(PeerLost):  # nobody waits for it any more
            self._carrier.tell(to, answer)

    def _forget(self, which: Callable[[_Step], bool], worker: int | None = None) -> list[_Step]:
        """With the lock: drop messages that are not answered; return their steps."""
        dropped = [n for n, (s, to) in self._steps.items() if to == worker or which(s)]
        return [self._steps.pop(number)[0] for number in dropped]

    # --- ends --------------------------------------------------------------------------------

    def _end(self, number: int, backward: PassId) -> None:
        """End a pass that has failed, here and on all processes that know its context."""
        context = self._contexts.get(number)
        if context is None or not context.end(backward):
            return
        with self._lock:
            self._forget(lambda step: step.backward == backward)
        self._tell(context, _End(number, backward))

    def _tell(self, context: Context, message: _End) -> None:
        body = msgspec.msgpack.encode(message)
        for worker in context.workers - {self._me.id}:
            with suppress(PeerLost):
                self._carrier.tell(worker, body)

    def _encoded(self, error: Exception) -> bytes:
        return failures.encode(error, self._me)


def _bytes(memory: torch.Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def _memory(data: memoryview) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


def _released(number: int) -> RpcError:
    return RpcError(f"the context {number} was released during its backward pass")


def _raised(node: int, error: bytes) -> DureError:
    """Return what the caller of `backward` gets for an error elsewhere."""
    cause = failures.decode(error)
    if isinstance(cause, PeerLost):
        return cause
    trace = getattr(cause, "remote_traceback", "")
    return RpcError(f"Error on Node {node}: {cause}", op="backward", remote_traceback=trace)
