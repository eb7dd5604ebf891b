"""What a process keeps of a distributed backward pass: which tensors left, and which came.

In a context, each message with tensors that need gradients has an id. The sender keeps, under it,
where the gradients of those tensors enter its graph; the receiver gives the tensors a node of its
own (`FromElsewhere`), whose gradients are sent back to the sender under that id.

A backward pass begins on one process, with the tensors that the user named. Its gradients go from
process to process: each message with gradients is answered when all that it has set off has been
answered. So the first process knows when nothing is under way any more; and if its graph, or that
of another, has parts that have not run, then some message of the context got no gradients. As in
torch's FAST mode, all messages of a context take part in each backward pass of it.

A pass that does not retain the graph forgets, when it is done here, the messages that took part.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from dure.errors import RpcError, UsageError
from dure.rpc.autograd.graph import Gradients, LocalGraph

__all__ = ["Context", "MessageId", "Outgoing", "PassId", "Progress"]

MessageId = tuple[int, int]
"""The process that sent a message, and a number of that process."""

PassId = tuple[int, int]
"""The process that began a backward pass, and a number of that process."""

Progress = tuple[int, str]
"""How many gradients of a pass have come to a process, and which are missing, for people."""

_ROOTS = "the tensors of backward"


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Gradients to be sent to the process that sent these tensors.

    Args:
        to: The process.
        message: The id under which the tensors came.
        gradients: One for each tensor of the message that needs one.
    """

    to: int
    message: MessageId
    gradients: Gradients


@dataclass(slots=True)
class _Sent:
    edges: list[GradientEdge]
    to: int
    what: str


@dataclass(slots=True)
class _Came:
    message: MessageId
    sender: int
    what: str
    anchor: torch.Tensor


@dataclass(slots=True)
class Context:
    """One context on one process.

    Args:
        number: Equal on all processes.
        me: This process.

    Attributes:
        workers: The other processes of which this one knows that they have the context.
        gradients: Of this process's leaves, summed over backward passes.

    Threads: any; graphs run one at a time.
    """

    number: int
    me: int
    workers: set[int] = field(default_factory=set[int])
    gradients: dict[torch.Tensor, torch.Tensor] = field(
        default_factory=dict[torch.Tensor, torch.Tensor]
    )
    _sent: dict[MessageId, _Sent] = field(default_factory=dict[MessageId, _Sent])
    _came: dict[Node, _Came] = field(default_factory=dict[Node, _Came])
    _graphs: dict[PassId, LocalGraph] = field(default_factory=dict[PassId, LocalGraph])
    _ended: set[PassId] = field(default_factory=set[PassId])
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def is_running(self) -> bool:
        """Whether a pass is under way here."""
        return bool(self._graphs)

    # --- forward -----------------------------------------------------------------------------

    def sends(self, message: MessageId, tensors: Sequence[torch.Tensor], to: int, what: str) -> int:
        """Take note of tensors that leave; return how many of them need gradients.

        Args:
            message: The message's id.
            tensors: All tensors of the message.
            to: Who receives it.
            what: The call, for people.
        """
        edges = [_edge(tensor) for tensor in tensors if tensor.requires_grad]
        self.workers.add(to)
        if edges:
            self._sent[message] = _Sent(edges, to, what)
        return len(edges)

    def receives(
        self, message: MessageId, tensors: list[torch.Tensor], sender: int, what: str
    ) -> list[torch.Tensor]:
        """Return the tensors of a message with their places in this process's graph.

        Args:
            message: The message's id.
            tensors: All tensors of the message; those that need gradients say so.
            sender: Who sent it.
            what: The call, for people.
        """
        self.workers.add(sender)
        needing = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]
        if not needing:
            return tensors
        anchor = torch.empty(0, requires_grad=True)
        made = _FromElsewhere.apply(anchor, [tensors[n].detach() for n in needing])
        placed = list(tensors)
        for n, tensor in zip(needing, made, strict=True):
            placed[n] = tensor
        node = made[0].grad_fn
        self._came[node] = _Came(message, sender, what, anchor)
        return placed

    # --- backward ----------------------------------------------------------------------------

    def begin(
        self, number: PassId, roots: Sequence[torch.Tensor], retain_graph: bool
    ) -> tuple[list[Outgoing], Progress]:
        """Begin a backward pass here; return the gradients that can be sent.

        Args:
            number: The pass.
            roots: Scalars of this process's graph.
            retain_graph: Whether there will be another pass.

        Raises:
            RpcError: A message of the context gets no gradients.
        """
        with self._lock:
            ones = [torch.ones_like(root) for root in roots]
            self._graphs[number] = self._graph([_edge(r) for r in roots], retain_graph)
            return self._run(number, _ROOTS, ones, retain_graph)

    def arrive(
        self,
        number: PassId,
        message: MessageId,
        gradients: Sequence[torch.Tensor | None],
        retain_graph: bool,
    ) -> tuple[list[Outgoing], Progress]:
        """Take the gradients of tensors that left; return those that can be sent now.

        Raises:
            RpcError: A message of the context gets no gradients.
        """
        with self._lock:
            if number in self._ended:
                return [], (sys.maxsize, "")
            if number not in self._graphs:
                self._graphs[number] = self._graph([], retain_graph)
            return self._run(number, message, gradients, retain_graph)

    def end(self, number: PassId) -> bool:
        """End a pass that has failed; tell whether that is new."""
        if number in self._ended:
            return False
        self._ended.add(number)  # without the lock: a graph that runs may wait for something else
        self._graphs.pop(number, None)
        return True

    def _graph(self, roots: list[GradientEdge], retain_graph: bool) -> LocalGraph:
        edges: dict[Any, list[GradientEdge]] = {m: s.edges for m, s in list(self._sent.items())}
        if roots:
            edges[_ROOTS] = roots
        graph = LocalGraph(edges, list(self._came), retain_graph)
        if graph.unreached:
            raise no_gradients("; ".join(self._came[node].what for node in graph.unreached))
        return graph

    def _run(
        self,
        number: PassId,
        root: Any,
        gradients: Sequence[torch.Tensor | None],
        retain_graph: bool,
    ) -> tuple[list[Outgoing], Progress]:
        graph = self._graphs[number]
        found = graph.arrive(root, gradients)
        for leaf, gradient in graph.leaves.items():
            before = self.gradients.get(leaf)
            self.gradients[leaf] = gradient if before is None else before + gradient
        graph.leaves.clear()
        outgoing = [
            Outgoing(self._came[node].sender, self._came[node].message, got or ())
            for node, got in found.items()
        ]
        if not graph.done:
            missing = [self._sent[m].what for m in graph.missing if isinstance(m, tuple)]
            return outgoing, (len(graph.roots) - len(missing), "; ".join(missing))
        self._graphs.pop(number, None)
        if not retain_graph:
            for message in graph.roots:
                self._sent.pop(message, None)  # pyright: ignore[reportCallIssue, reportArgumentType]
            for node in graph.received:
                del self._came[node]
        return outgoing, (sys.maxsize, "")


def _edge(tensor: torch.Tensor) -> GradientEdge:
    """Return where the gradient of a tensor enters its graph."""
    if tensor.layout is not torch.strided:
        copy = tensor.clone().grad_fn  # torch's way makes a view, and there are none of these
        assert copy is not None
        node, number = copy.next_functions[0]
        assert node is not None
        return GradientEdge(node, number, copy)
    return get_gradient_edge(tensor)


def no_gradients(what: str) -> RpcError:
    """Return the error about messages of a context that a backward pass does not reach."""
    return RpcError(
        "the result of a remote call got no gradient in this backward pass",
        op="backward",
        seen=what,
        fix="Let all results that need gradients take part in the loss, detach those that do not, "
        "or make such calls outside of the context.",
    )


class _FromElsewhere(torch.autograd.Function):
    """Where tensors of another process enter the graph; never executed (`LocalGraph`)."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, tensors: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        return tuple(tensors)  # in a list they are no inputs, and the results no views of them

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        raise UsageError(
            "these gradients belong to another process",
            op="backward",
            fix="Call dure.autograd.backward(context_id, [loss]) for a loss that remote calls "
            "have part in, once, or with retain_graph=True.",
        )
