"""The contexts of one process, and backward passes through them.

**Forward.** While a thread is in a context (`inside`), the agent tags each message that it sends
(`sending`): the receiver then knows of the context, too (`receiving`), and serves the call in it,
so that the calls made there are tagged again. What needs gradients is noted on both sides
(`context`).

**Backward.** Gradients go back to where tensors came from. Each message with gradients sets off a
step in the process that it comes to: that runs what can be run, and sends on what this gives. The
pass is over when no such message is under way and no step runs. To know that, its first process
has 1 credit: each message carries a share of the credit of the step that has sent it, and a step
that sends none gives its share back to the first process. When that has 1 again, all is done; in a
pass there and back, no message but those with gradients is needed. Credits are powers of 1/2.

Steps of the first process run in the thread that waits in `backward`; others where they come in.

Along with the credit goes how many gradients the processes wait for: each adds those of its tensors
that left, when it first has part in the pass, and takes off one for each that comes. If some are
missing at the end, a call's result got no gradients, and the pass has failed: all are told that it
has ended, and those that wait answer with the calls' names.

**Failures.** Messages with gradients are sent once. Who sees an error, or the loss of a process or
of a connection that gradients went through, tells the first process. It raises the error, and
tells all that know the context that the pass has ended (`_End`): they forget what they have of it,
and drop what still comes for it. A context is released in the same way, and also when the process
that made it dies. These messages are reliable (`links`).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from dure.errors import DureError, PeerLost, RpcError
from dure.rpc import failures
from dure.rpc.autograd.context import Context, PassId, Step, no_gradients
from dure.rpc.envelope import GradientTag, Waiter
from dure.rpc.names import WorkerInfo

if TYPE_CHECKING:
    from dure.rpc.agent import Agent

__all__ = ["Contexts", "attach", "current", "inside", "set_current"]

_ID_BITS = 48
"""A context's number: the process that made it, and in so many bits a number of that process."""

_KEPT = 10_000
"""How many contexts that were released are remembered, for messages that come late."""

_TOPIC = 1
"""Of these messages, among the reliable ones."""

_here = threading.local()


def attach(agent: Agent) -> None:
    """Let an agent know of contexts; before messages come."""
    contexts = agent.gradients = Contexts(agent.me, agent)
    agent.on(_TOPIC, contexts.receive)


def current() -> int | None:
    """Return the context that the calling thread is in."""
    return getattr(_here, "number", None)


def set_current(number: int | None) -> None:
    """Say which context the calling thread is in."""
    _here.number = number


class inside:
    """While within, the calling thread is in a context, or in none."""

    def __init__(self, number: int | None) -> None:
        self._number = number

    def __enter__(self) -> None:
        self._before = current()
        _here.number = self._number

    def __exit__(self, *error: object) -> None:
        _here.number = self._before


class _Back(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """To who began a pass: a share of the credit, 1/2**share; or what is missing; or an error."""

    backward: PassId
    share: int = 0
    awaited: int = 0
    missing: list[str] = []
    node: int = -1
    error: bytes = b""


class _End(msgspec.Struct, array_like=True, frozen=True, tag=1):
    context: int
    backward: PassId | None  # None: the context is released


_decoder = msgspec.msgpack.Decoder(_Back | _End)


class _Pass:
    """A backward pass that began here."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.credit = Fraction(0)
        self.awaited = 0
        self.asked = False  # who waits for gradients, and for what
        self.missing: list[str] = []
        self.failed: _Back | None = None
        self.arrivals: deque[Callable[[], None]] = deque()
        self.ticket: Waiter | None = None

    @property
    def over(self) -> bool:
        done = self.awaited == 0 if self.asked else self.credit == 1
        return done or self.failed is not None


class Contexts:
    """The contexts of one process.

    Args:
        me: This process.
        agent: Who carries its messages.

    Threads: any.
    """

    def __init__(self, me: WorkerInfo, agent: Agent) -> None:
        self._me, self._agent = me, agent
        self._contexts: dict[int, Context] = {}
        self._released: dict[int, None] = {}  # in their order
        self._numbers = itertools.count(1)  # of contexts, passes and messages
        self._passes: dict[PassId, _Pass] = {}
        self._lock = threading.Lock()

    @property
    def counts(self) -> tuple[int, int]:
        """How many contexts there are, and through how many of them a pass is under way."""
        with self._lock:
            contexts = list(self._contexts.values())
        running = {context.number for context in contexts if context.is_running}
        running |= {run.context for run in list(self._passes.values())}
        return len(contexts), len(running)

    @property
    def max_number(self) -> int:
        """The largest number that a context of this process can have."""
        return (self._me.id << _ID_BITS) + (1 << _ID_BITS) - 1

    # --- contexts ----------------------------------------------------------------------------

    def new(self) -> Context:
        """Make a context."""
        number = (self._me.id << _ID_BITS) + next(self._numbers)
        context = self._contexts[number] = Context(number)
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

    def release(self, number: int, teller: int = -1) -> None:
        """Forget a context, here and on all processes that know it; none is an error.

        Args:
            number: The context.
            teller: Who has said so, if not this process.
        """
        with self._lock:
            context = self._contexts.pop(number, None)
            if context is None:
                return
            self._released[number] = None
            if len(self._released) > _KEPT:
                del self._released[next(iter(self._released))]
        passes = [this for this, run in list(self._passes.items()) if run.context == number]
        for this in passes:
            error = RpcError(f"the context {number} was released during its backward pass")
            self._failed(this, error)
        context.workers.discard(teller)
        self._tell_all(context, _End(number, None), hurry=False)

    def _known(self, number: int) -> Context | None:
        """Return a context that another process has spoken of; None: it is released."""
        context = self._contexts.get(number)
        if context is None and number >> _ID_BITS != self._me.id:
            with self._lock:
                if number not in self._released:
                    context = self._contexts.setdefault(number, Context(number))
        return context

    # --- forward: what the agent asks of messages -------------------------------------------

    def sending(self, to: int, what: str, tensors: Sequence[torch.Tensor]) -> GradientTag | None:
        """Take note of a message that this thread sends; return its tag if it is in a context."""
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
        """Return the tensors of a message with their places in the graph."""
        context = self._known(tag.context)
        if context is None:
            return tensors
        context.workers.add(sender)
        return context.receives(tag.message, tensors, sender, tag.what) if tag.needing else tensors

    def serving(self, tag: GradientTag) -> AbstractContextManager[None]:
        """Return what a call that came with the tag runs in, its answer included."""
        context = self._known(tag.context)  # also where a message has nothing to unpack
        if context is not None:
            context.workers.add(tag.message[0])
        return inside(tag.context)

    # --- backward ----------------------------------------------------------------------------

    def backward(self, number: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Run a backward pass that begins here, to its end; see `api.backward`."""
        context = self.find(number)
        this = self._me.id, next(self._numbers)
        run = self._passes[this] = _Pass(number)
        try:
            with inside(None), _profiled("torch::distributed::autograd::backward"):
                step = context.begin(this, roots, retain_graph)
                self._go_on(context, this, retain_graph, 0, 0, step)
                while not run.over:
                    self._wait(run)
                if run.awaited and run.failed is None:
                    run.asked = True
                    self._end(number, this)
                    while not run.over:
                        self._wait(run)
            if run.failed is not None:
                raise _raised(run.failed.node, run.failed.error)
            if run.missing:
                raise no_gradients("; ".join(run.missing))
        except BaseException:
            self._end(number, this)
            raise
        finally:
            del self._passes[this]

    def _wait(self, run: _Pass) -> None:
        """Run what gradients set off that have come, or wait for something to come."""
        with self._lock:
            arrival = run.arrivals.popleft() if run.arrivals else None
            if arrival is None and run.over:
                return
            ticket = run.ticket = None if arrival else self._agent.transport.ticket()
        if arrival is not None:
            arrival()
        elif ticket is not None:
            self._agent.transport.wait(ticket, 60.0)

    def waits(self, backward: PassId, arrival: Callable[[], None]) -> bool:
        """Whether a thread waits in that backward pass; it then runs what gradients set off."""
        run = self._passes.get(backward)
        if run is None:
            return False
        with self._lock:
            run.arrivals.append(arrival)
        self._wake(run)
        return True

    def arrive(self, backward: PassId, read: Callable[[], Any]) -> None:
        """Run what gradients set off; `read` returns what `send_gradients` was given."""
        try:
            number, sender, sent, retain_graph, share, awaited, *gradients = read()
            context = self.find(number)
            with inside(None), _profiled("SendRpcBackward"):
                step = context.arrive(backward, (sender, sent), gradients, retain_graph)
            self._go_on(context, backward, retain_graph, share, awaited, step)
        except Exception as error:
            self._failed(backward, error)

    def _go_on(
        self,
        context: Context,
        backward: PassId,
        retain_graph: bool,
        share: int,
        awaited: int,
        step: Step,
    ) -> None:
        """Send gradients on, with shares of the credit; where there are none, give it back."""
        outgoing, more = step
        awaited += more
        if not outgoing:
            self._back(_Back(backward, share, awaited))
        for left, (to, message, gradients) in zip(
            range(len(outgoing) - 1, -1, -1), outgoing, strict=True
        ):
            share += left > 0  # one half for this message, the other for those after it
            values = context.number, *message, retain_graph, share, awaited, *map(_dense, gradients)
            with _profiled("RecvRpcBackward"):
                self._agent.send_gradients(to, backward, values)
            awaited = 0

    def _back(self, message: _Back) -> None:
        if message.backward[0] != self._me.id:
            self._tell(message.backward[0], message)
            return
        run = self._passes.get(message.backward)
        if run is None:
            return
        with self._lock:
            if message.error:
                run.failed = run.failed or message
            else:
                run.credit += Fraction(1, 1 << message.share)
                run.awaited += message.awaited
                run.missing += message.missing
        self._wake(run)

    def _failed(self, backward: PassId, error: Exception) -> None:
        encoded = failures.encode(error, self._me)
        self._back(_Back(backward, node=self._me.id, error=encoded))

    def _wake(self, run: _Pass) -> None:
        with self._lock:
            ticket, run.ticket = run.ticket, None
        if ticket is not None:
            self._agent.transport.complete(ticket)

    def _end(self, number: int, backward: PassId) -> None:
        """End a pass that has failed, here and on all processes that know its context."""
        context = self._contexts.get(number)
        missing = None if context is None else context.end(backward)
        if context is not None and missing is not None:
            self._tell_all(context, _End(number, backward))
            if missing:
                self._back(_Back(backward, awaited=-len(missing), missing=missing))

    # --- what comes --------------------------------------------------------------------------

    def receive(self, sender: int, body: bytes) -> None:
        """Take a reliable message; returns quickly."""
        message = _decoder.decode(body)
        if isinstance(message, _Back):
            self._back(message)
        elif message.backward is not None:
            self._end(message.context, message.backward)
        else:
            self.release(message.context, sender)

    def lost(self, worker: int, error: DureError) -> None:
        """Take note of a process that is gone (`PeerLost`), or of a connection that broke."""
        for context in list(self._contexts.values()):
            for backward, part in list(context.passes.items()):
                if worker in part.asked:
                    self._failed(backward, error)
            if isinstance(error, PeerLost):
                context.workers.discard(worker)
                if context.number >> _ID_BITS == worker:
                    self.release(context.number)

    def _tell(self, to: int, message: msgspec.Struct, hurry: bool = True) -> None:
        with suppress(PeerLost):
            self._agent.tell(to, _TOPIC, msgspec.msgpack.encode(message), hurry)

    def _tell_all(self, context: Context, message: _End, hurry: bool = True) -> None:
        for worker in context.workers - {self._me.id}:
            self._tell(worker, message, hurry)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient as it is sent soonest: those of sums are one number in many places."""
    if gradient is None or gradient.layout is not torch.strided or gradient.numel() > 1024:
        return gradient
    return gradient.contiguous()


def _profiled(name: str) -> AbstractContextManager[Any]:
    """Return what shows in torch's profiler, where one runs."""
    if torch.autograd._profiler_enabled():  # pyright: ignore
        return torch.profiler.record_function(name)
    return nullcontext()


def _raised(node: int, error: bytes) -> DureError:
    """Return what the caller of `backward` gets for an error elsewhere."""
    cause = failures.decode(error)
    if isinstance(cause, PeerLost):
        return cause
    trace = getattr(cause, "remote_traceback", "")
    return RpcError(f"Error on Node {node}: {cause}", op="backward", remote_traceback=trace)
