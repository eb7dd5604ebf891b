"""Distributed autograd in one process: its contexts, and backward passes through them.

**Forward.** While a thread is in a context (`inside`), the agent tags each message that it sends
(`sending`). The receiver then knows the context, too (`receiving`), and runs the call in it, so
that the calls made there are tagged again. The sender of tensors that need gradients records, under
the message's id, where these enter its graph; the receiver gives the tensors a node (`graph.place`)
whose gradients are sent back under that id.

**Backward.** As in torch's FAST mode, all messages of a context take part in each pass. Each
message with gradients triggers a step in its receiver: the step runs the part of the graph that is
ready (`graph`), and sends the resulting gradients. The pass is over when no such message is under
way and no step runs. To detect that, its first process has 1 credit: each message carries a share
of the credit of the step that sent it, and a step that sends none returns its share to the first
process. When that has 1 again, the pass is over; in a pass to one process and back, no other
messages are needed. Shares are powers of 1/2.

Steps of the first process run in the thread that waits in `backward`; others in the thread that
receives the gradients.

With the credit travels the number of gradients that processes wait for: each process adds those of
its messages when it joins the pass, and subtracts one for each that arrives. If some are missing at
the end, a call's result got no gradients, and the pass has failed: all processes are notified, and
those that wait reply with the names of the calls.

**Failures.** A process that sees an error, or the loss of a process that gradients went to, reports
it to the first process. That raises the error, and notifies all that know the context that the pass
has ended (`_PassEnd`): they discard its state, and drop gradients that arrive later. A context is
released in the same way, and also when the process that made it dies.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch.autograd.graph import GradientEdge, Node

from dure import torch_private
from dure.errors import DureError, PeerLost, RpcError
from dure.rpc import failures
from dure.rpc.autograd.graph import Gradients, LocalGraph, edge_of, place
from dure.rpc.current import here
from dure.rpc.message import GradientTag, PassTag
from dure.rpc.names import WorkerInfo

if TYPE_CHECKING:
    from dure.native import Ticket
    from dure.rpc.agent import RpcAgent

__all__ = ["TOPIC", "Context", "Contexts", "current", "inside", "set_current"]

MessageId = tuple[int, int]
"""The process that sent a message, and a number of that process."""

PassId = tuple[int, int]
"""The process that started a backward pass, and a number of that process."""

_ROOTS = 0, -1
"""Instead of the id of a message: the losses, whose gradients start a pass."""

_ID_BITS = 48
"""A context's number is the process that made it, and in this many bits a number of it."""

_KEPT = 10_000
"""How many released contexts are remembered, for messages that arrive late."""

TOPIC = 1
"""Of reports about contexts and backward passes."""

_NOTHING = nullcontext()


def current() -> int | None:
    """Return the context that the calling thread is in."""
    return here.context


def set_current(number: int | None) -> None:
    """Set the context that the calling thread is in."""
    here.context = number


class inside:
    """Set the context of the calling thread, or None, for a block."""

    def __init__(self, number: int | None) -> None:
        self._number = number

    def __enter__(self) -> None:
        self._before = current()
        here.context = self._number

    def __exit__(self, *error: object) -> None:
        here.context = self._before


# --- one context ----------------------------------------------------------------------------------


class _SentTensors(NamedTuple):
    edges: list[GradientEdge]
    what: str


class _ReceivedTensors(NamedTuple):
    message: MessageId
    sender: int
    what: str
    size: int  # how many of its tensors need gradients


@dataclass(slots=True, eq=False)
class _LocalPass:
    """A process's part in a pass."""

    graph: LocalGraph[MessageId] | None = None  # while it waits for gradients
    asked: set[int] = field(default_factory=set[int])  # processes that gradients were sent to
    ended: bool = False  # by an error


class Context:
    """One context on one process.

    Args:
        number: Equal on all processes.

    Attributes:
        workers: The other processes that are known to have the context.
        gradients: Of this process's leaves, summed over backward passes.
        passes: The backward passes that this process takes part in.

    Threads:
        Any; graphs run one at a time.

    Obtained from:
        The context manager `dure.autograd.context` makes one, and returns its number.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.workers: set[int] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[PassId, _LocalPass] = {}
        self._sent: dict[MessageId, _SentTensors] = {}
        self._came: dict[Node, _ReceivedTensors] = {}
        self._lock = threading.RLock()

    @property
    def is_running(self) -> bool:
        """Whether a pass is under way here."""
        return any(part.graph is not None for part in list(self.passes.values()))

    def _context_id(self) -> int:
        return self.number

    def sends(self, message: MessageId, tensors: Sequence[torch.Tensor], to: int, what: str) -> int:
        """Record the tensors of a message to `to`; return how many need gradients."""
        edges = [edge_of(tensor) for tensor in tensors if tensor.requires_grad]
        self.workers.add(to)
        if edges:
            self._sent[message] = _SentTensors(edges, what)
        return len(edges)

    def receives(
        self, message: MessageId, tensors: list[torch.Tensor], sender: int, what: str
    ) -> list[torch.Tensor]:
        """Return the tensors of a message; those that need gradients become part of the graph."""
        needing = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]
        placed = place([tensors[n] for n in needing])
        node = placed[0].grad_fn
        assert node is not None
        self._came[node] = _ReceivedTensors(message, sender, what, len(placed))
        for n, tensor in zip(needing, placed, strict=True):
            tensors[n] = tensor
        return tensors

    def begin(self, number: PassId, roots: Sequence[torch.Tensor], retain_graph: bool) -> int:
        """Start a pass, at losses of this process or when the first gradients arrive.

        Returns:
            How many messages of this process wait for gradients.

        Raises:
            RpcError: A message of the context gets no gradients.
        """
        with self._lock:
            edges = {message: sent.edges for message, sent in list(self._sent.items())}
            if roots:
                edges[_ROOTS] = [edge_of(root) for root in roots]
            sizes = {node: came.size for node, came in list(self._came.items())}
            graph = LocalGraph(edges, sizes, retain_graph)
            if graph.unreached:
                raise _no_gradients([self._came[node].what for node in graph.unreached])
            self.passes[number] = _LocalPass(graph)
            return len(edges)

    def arrive(
        self,
        sender: int,
        came: PassTag,
        gradients: Sequence[torch.Tensor | None],
    ) -> tuple[list[tuple[_ReceivedTensors, Gradients]], int]:
        """Add the gradients of a message's tensors, and run what is ready.

        Returns:
            The gradients to send now, each with the message that brought its tensors, and how many
            more messages wait for gradients.

        Raises:
            RpcError: A message of the context gets no gradients, or `sender` sent gradients that no
                message waits for.
        """
        number, message, retain_graph = came.backward, came.message, came.retain_graph
        with self._lock:
            more = 0 if number in self.passes else self.begin(number, (), retain_graph)
            part = self.passes[number]
            graph = part.graph
            if graph is None:
                return [], 0
            if message not in graph.missing or len(gradients) != len(graph.roots[message]):
                error = ValueError(f"gradients that no message waits for: {came}")
                raise failures.malformed_message(sender, error)
            complete = graph.arrive(message, gradients)
            outgoing = [(self._came[node], got) for node, got in complete.items()]
            part.asked.update([to.sender for to, _ in outgoing])
            if not graph.missing:
                part.graph = None
                self._finish(graph, retain_graph)
            return outgoing, more - 1

    def _finish(self, graph: LocalGraph[MessageId], retain_graph: bool) -> None:
        for leaf, gradient in graph.leaves.items():
            before = self.gradients.get(leaf)
            self.gradients[leaf] = gradient if before is None else before + gradient
        if not retain_graph:
            for message in graph.roots:
                self._sent.pop(message, None)
            for node in graph.received:
                del self._came[node]

    def end(self, number: PassId) -> list[str] | None:
        """End a failed pass; return the calls without gradients, or None if it ended before."""
        part = self.passes.setdefault(number, _LocalPass())
        if part.ended:
            return None
        part.ended = True  # without the lock, which a running graph may hold for long
        graph, part.graph = part.graph, None
        missing = () if graph is None else graph.missing.copy()
        return [self._sent[message].what for message in missing if message != _ROOTS]


# --- messages -------------------------------------------------------------------------------------


class _PassReport(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """To the first process: 1/2**share of the credit, calls without gradients, or an error."""

    backward: PassId
    share: int = 0
    awaited: int = 0
    missing: list[str] = []
    node: int = -1
    error: bytes = b""


class _PassEnd(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The end of a failed pass, or of a context."""

    context: int
    backward: PassId | None  # None: the context is released


_decoder = msgspec.msgpack.Decoder(_PassReport | _PassEnd)


class _Pass:
    """A backward pass that started here."""

    def __init__(self, context: int, ticket: Ticket) -> None:
        self.context, self.ticket = context, ticket
        self.shares: set[int] = set()  # of the credit, all different
        self.awaited = 0
        self.asked = False  # which calls wait for gradients
        self.missing: list[str] = []
        self.failed: _PassReport | None = None
        self.arrivals: deque[Callable[[], None]] = deque()

    def add(self, back: _PassReport) -> None:
        """Add a report."""
        if back.error:
            self.failed = self.failed or back
            return
        self.awaited += back.awaited
        self.missing += back.missing
        share = back.share
        while share in self.shares:  # two equal shares are one that is twice as large
            self.shares.remove(share)
            share -= 1
        self.shares.add(share)

    @property
    def over(self) -> bool:
        done = self.awaited == 0 if self.asked else 0 in self.shares
        return done or self.failed is not None


# --- all of them ----------------------------------------------------------------------------------


class Contexts:
    """The contexts of one process.

    Args:
        me: This process.
        agent: Sends its messages.

    Threads:
        Any.
    """

    def __init__(self, me: WorkerInfo, agent: RpcAgent) -> None:
        self._me, self._agent = me, agent
        self._contexts: dict[int, Context] = {}
        self._released: dict[int, None] = {}  # in their order
        self._numbers = itertools.count(1)  # of contexts, passes and messages
        self._passes: dict[PassId, _Pass] = {}
        self._lock = threading.Lock()

    @property
    def counts(self) -> tuple[int, int]:
        """How many contexts there are, and in how many of them a pass runs."""
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

    def release(self, number: int, sender: int = -1) -> None:
        """Forget a context, here and on all processes that know it, if it is known.

        Args:
            number: The context.
            sender: The process that has released it, if not this one.
        """
        with self._lock:
            context = self._contexts.pop(number, None)
            self._released[number] = None  # a call in it may still wait for a thread
            if len(self._released) > _KEPT:
                del self._released[next(iter(self._released))]
            if context is None:
                return
        passes = [this for this, run in list(self._passes.items()) if run.context == number]
        for this in passes:
            error = RpcError(f"the context {number} was released during its backward pass")
            self._failed(this, error)
        context.workers.discard(sender)
        self._send_all(context, _PassEnd(number, None), hurry=False)

    def _known(self, number: int) -> Context | None:
        """Return a context that another process has sent; None if it is released."""
        context = self._contexts.get(number)
        if context is None and number >> _ID_BITS != self._me.id:
            with self._lock:
                if number not in self._released:
                    context = self._contexts.setdefault(number, Context(number))
        return context

    # --- forward: called by the agent for each message ---------------------------------------

    def sending(self, to: int, what: str, tensors: Sequence[torch.Tensor]) -> GradientTag | None:
        """Record a message that this thread sends; return its tag if the thread is in a context."""
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
        """Return the tensors of a message as part of the graph."""
        context = self._known(tag.context)
        if context is None:
            return tensors
        context.workers.add(sender)
        return context.receives(tag.message, tensors, sender, tag.what) if tag.needing else tensors

    def serving(self, tag: GradientTag | None) -> AbstractContextManager[None]:
        """Return the context in which a call that came with the tag runs, with its answer.

        That of a call without a tag is none, also if the thread is in one: it may be answered by a
        thread that waits, or that makes the value which it fetches.
        """
        if tag is None:
            return inside(None)
        context = self._known(tag.context)  # also if the message has nothing to unpack
        if context is not None:
            context.workers.add(tag.message[0])
        return inside(tag.context)

    # --- backward ----------------------------------------------------------------------------

    def backward(self, number: int, roots: Sequence[torch.Tensor], retain_graph: bool) -> None:
        """Run a backward pass that starts here; see `api.backward`."""
        context = self.find(number)
        this = self._me.id, next(self._numbers)
        run = self._passes[this] = _Pass(number, self._agent.transport.ticket())
        try:
            with inside(None), _profiled("torch::distributed::autograd::backward"):
                awaited = context.begin(this, roots, retain_graph)
                ones = [torch.ones_like(root) for root in roots]
                losses = PassTag(this, number, _ROOTS, retain_graph, 0, awaited)
                self._step(context, self._me.id, losses, ones)
                self._wait(run)
                if run.awaited and run.failed is None:
                    run.asked = True
                    self._end(number, this)
                    self._wait(run)
            if run.failed is not None:
                allow, failed = self._agent.allow, run.failed
                cause = failures.decode(failed.error, failed.node, allow and allow.find_error)
                raise _raised(failed.node, cause)
            if run.missing:
                raise _no_gradients(run.missing)
        except BaseException:
            self._end(number, this)
            raise
        finally:
            del self._passes[this]

    def _wait(self, run: _Pass) -> None:
        """Wait until a pass is over, and run the steps of gradients that arrive."""
        while True:
            while run.arrivals:
                run.arrivals.popleft()()
            if run.over:
                return
            if run.ticket.done:
                run.ticket = self._agent.transport.ticket()  # and check again before waiting
            elif not self._agent.transport.wait(run.ticket):
                raise RpcError("RPC was shut down during this backward pass", op="backward")

    def waits(self, backward: PassId, arrival: Callable[[], None]) -> bool:
        """Whether a thread waits in that backward pass; it then runs the step of the gradients."""
        run = self._passes.get(backward)
        if run is None:
            return False
        run.arrivals.append(arrival)
        self._agent.transport.complete(run.ticket)
        return True

    def arrive(self, came: PassTag, sender: int, read: Callable[[], Any]) -> None:
        """Run the step of gradients that arrived, in a thread that is in no context.

        Args:
            came: Of the message.
            sender: The process that sent the gradients.
            read: Returns the gradients.
        """
        try:
            gradients = read()
            if not all(each is None or isinstance(each, torch.Tensor) for each in gradients):
                raise failures.malformed_message(sender, TypeError("gradients must be tensors"))
            with _profiled("SendRpcBackward"):
                self._step(self.find(came.context), sender, came, gradients)
        except BaseException as error:  # also SystemExit: the pass waits for an answer
            self._failed(came.backward, error)
            if isinstance(error, KeyboardInterrupt):  # Ctrl-C in the thread that waits
                raise

    def _step(
        self,
        context: Context,
        sender: int,
        came: PassTag,
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Add gradients; send the resulting ones with shares of the credit, or return it."""
        outgoing, more = context.arrive(sender, came, gradients)
        share, awaited = came.share, came.awaited + more
        if not outgoing:
            self._report(_PassReport(came.backward, share, awaited))
        while outgoing:
            to, got = outgoing.pop()
            share += bool(outgoing)  # one half for this message, the other for those after it
            tag = PassTag(
                came.backward, context.number, to.message, came.retain_graph, share, awaited
            )
            with _profiled("RecvRpcBackward"):
                self._agent.send_gradients(to.sender, tag, tuple(map(_dense, got)))
            awaited = 0

    def _report(self, message: _PassReport) -> None:
        if message.backward[0] != self._me.id:
            self._send(message.backward[0], message)
            return
        run = self._passes.get(message.backward)
        if run is not None:
            with self._lock:
                run.add(message)
            self._agent.transport.complete(run.ticket)

    def _failed(self, backward: PassId, error: BaseException) -> None:
        encoded = failures.encode(error, self._me)
        self._report(_PassReport(backward, node=self._me.id, error=encoded))

    def _end(self, number: int, backward: PassId) -> None:
        """End a pass that has failed, here and on all processes that know its context."""
        context = self._contexts.get(number)
        missing = None if context is None else context.end(backward)
        if context is not None and missing is not None:
            self._send_all(context, _PassEnd(number, backward))
            if missing:
                self._report(_PassReport(backward, awaited=-len(missing), missing=missing))

    # --- messages of other processes ---------------------------------------------------------

    def receive(self, sender: int, body: bytes) -> None:
        """Handle a report; returns quickly."""
        message = _decoder.decode(body)
        if isinstance(message, _PassReport):
            self._report(message)
        elif message.backward is not None:
            self._end(message.context, message.backward)
        else:
            self.release(message.context, sender)

    def lost(self, worker: int, error: PeerLost) -> None:
        """Handle that a process is gone."""
        for context in list(self._contexts.values()):
            for backward, part in list(context.passes.items()):
                if worker in part.asked:
                    self._failed(backward, error)
            context.workers.discard(worker)
            if context.number >> _ID_BITS == worker:
                self.release(context.number)

    def _send(self, to: int, message: msgspec.Struct, hurry: bool = True) -> None:
        with self._agent.step():
            self._agent.queue(to, TOPIC, msgspec.msgpack.encode(message), hurry)

    def _send_all(self, context: Context, message: _PassEnd, hurry: bool = True) -> None:
        for worker in context.workers.copy():
            if worker != self._me.id:
                self._send(worker, message, hurry)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a small gradient contiguous: that of a sum is one number with stride 0."""
    if gradient is None or gradient.layout is not torch.strided or gradient.numel() > 1024:
        return gradient
    return gradient.contiguous()


def _profiled(name: str) -> AbstractContextManager[Any]:
    """Return a range of torch's profiler, if one runs."""
    if torch_private.profiler_enabled():
        return torch.profiler.record_function(name)
    return _NOTHING


def _raised(node: int, cause: Exception) -> DureError:
    """Return the error that `backward` raises for an error of another process."""
    if isinstance(cause, PeerLost):
        return cause
    trace = getattr(cause, "remote_traceback", "")
    return RpcError(f"Error on Node {node}: {cause}", op="backward", remote_traceback=trace)


def _no_gradients(what: Sequence[str]) -> RpcError:
    """Return the error about messages of a context that a backward pass does not reach."""
    return RpcError(
        "the result of a remote call got no gradient in this backward pass",
        op="backward",
        seen="; ".join(what),
        fix="Let all results that need gradients take part in the loss, detach those that do not, "
        "or make such calls outside of the context.",
    )
