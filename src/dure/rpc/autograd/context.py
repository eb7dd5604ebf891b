"""What a process keeps of a distributed backward pass: which tensors left, and which came.

In a context, each message with tensors that need gradients has an id. The sender keeps, under it,
where the gradients of those tensors enter its graph; the receiver gives the tensors a node of its
own (`graph.place`), whose gradients are sent back to the sender under that id.

As in torch's FAST mode, all messages of a context take part in each backward pass of it. A pass
that does not retain the graph forgets, when it is done here, the messages that took part.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from dure.errors import RpcError
from dure.rpc.autograd.graph import Gradients, LocalGraph, leaf_lock, place

__all__ = ["Context", "MessageId", "Outgoing", "PassId", "Step", "no_gradients"]

MessageId = tuple[int, int]
"""The process that sent a message, and a number of that process."""

PassId = tuple[int, int]
"""The process that began a backward pass, and a number of that process."""

Step = tuple[list["Outgoing"], int]
"""What comes of gradients: those that can be sent now, and how many more this process waits for."""

_ROOTS = "the tensors of backward"


class Outgoing(NamedTuple):
    """Gradients for the process that sent these tensors, one for each that needs one."""

    to: int
    message: MessageId
    gradients: Gradients


class _Sent(NamedTuple):
    edges: list[GradientEdge]
    what: str


class _Came(NamedTuple):
    message: MessageId
    sender: int
    what: str


@dataclass(slots=True, eq=False)
class _Part:
    """What a process does for a pass."""

    graph: LocalGraph | None = None
    asked: set[int] = field(default_factory=set[int])  # to whom gradients were sent
    over: bool = False  # whether the graph has run, or the pass has ended
    ended: bool = False  # whether the pass has, by an error


class Context:
    """One context on one process.

    Args:
        number: Equal on all processes.

    Attributes:
        workers: The other processes of which this one knows that they have the context.
        gradients: Of this process's leaves, summed over backward passes.
        passes: Those that have come here.

    Threads: any; graphs run one at a time.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.workers: set[int] = set()
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[PassId, _Part] = {}
        self._sent: dict[MessageId, _Sent] = {}
        self._came: dict[Node, _Came] = {}
        self._lock = threading.RLock()

    @property
    def is_running(self) -> bool:
        """Whether a pass is under way here."""
        return any(part.graph is not None for part in list(self.passes.values()))

    def _context_id(self) -> int:
        return self.number

    def _known_worker_ids(self) -> set[int]:
        return set(self.workers)

    # --- forward -----------------------------------------------------------------------------

    def sends(self, message: MessageId, tensors: Sequence[torch.Tensor], to: int, what: str) -> int:
        """Take note of the tensors of a message to `to`; return how many need gradients."""
        edges = [_edge(tensor) for tensor in tensors if tensor.requires_grad]
        self.workers.add(to)
        if edges:
            self._sent[message] = _Sent(edges, what)
        return len(edges)

    def receives(
        self, message: MessageId, tensors: list[torch.Tensor], sender: int, what: str
    ) -> list[torch.Tensor]:
        """Return the tensors of a message, those that need gradients with places in the graph."""
        self.workers.add(sender)
        needing = [n for n, tensor in enumerate(tensors) if tensor.requires_grad]
        if needing:
            made = place([tensors[n].detach() for n in needing])
            tensors = list(tensors)
            for n, tensor in zip(needing, made, strict=True):
                tensors[n] = tensor
            node = made[0].grad_fn
            assert node is not None
            self._came[node] = _Came(message, sender, what)
        return tensors

    # --- backward ----------------------------------------------------------------------------

    def begin(self, number: PassId, roots: Sequence[torch.Tensor], retain_graph: bool) -> Step:
        """Begin a pass at scalars of this process; as `arrive`."""
        ones = [torch.ones_like(root) for root in roots]
        edges = {_ROOTS: [_edge(root) for root in roots]}
        return self.arrive(number, _ROOTS, ones, retain_graph, edges)

    def arrive(
        self,
        number: PassId,
        root: MessageId | str,
        gradients: Sequence[torch.Tensor | None],
        retain_graph: bool,
        more: Mapping[str, list[GradientEdge]] = MappingProxyType({}),
    ) -> Step:
        """Take the gradients of tensors that left, in a message or, where `more` says, by name.

        Raises:
            RpcError: A message of the context gets no gradients.
        """
        with self._lock:
            part = self.passes.setdefault(number, _Part())
            more_awaited = -1
            if part.graph is None and not part.over:
                part.graph = self._graph(more, retain_graph)
                more_awaited += len(part.graph.roots)
            graph = part.graph
            if graph is None:
                return [], 0
            outgoing = [
                Outgoing(self._came[node].sender, self._came[node].message, got)
                for node, got in graph.arrive(root, gradients).items()
            ]
            part.asked.update(out.to for out in outgoing)
            if not graph.missing:
                part.graph, part.over = None, True
                for leaf, gradient in graph.leaves.items():
                    before = self.gradients.get(leaf)
                    self.gradients[leaf] = gradient if before is None else before + gradient
                if not retain_graph:
                    for message in graph.roots:
                        self._sent.pop(message, None)  # pyright: ignore[reportCallIssue, reportArgumentType]
                    for node in graph.received:
                        del self._came[node]
            return outgoing, more_awaited

    def _graph(self, more: Mapping[str, list[GradientEdge]], retain_graph: bool) -> LocalGraph:
        edges: dict[Any, list[GradientEdge]] = {m: s.edges for m, s in list(self._sent.items())}
        graph = LocalGraph({**edges, **more}, list(self._came), retain_graph)
        if graph.unreached:
            raise no_gradients("; ".join(self._came[node].what for node in graph.unreached))
        return graph

    def end(self, number: PassId) -> list[str] | None:
        """End a pass that has failed; return what has got no gradients; None: it ended before."""
        part = self.passes.setdefault(number, _Part())
        if part.ended:
            return None
        part.over = part.ended = True  # without the lock: a graph may run, and wait
        graph, part.graph = part.graph, None
        missing = [] if graph is None else list(graph.missing)
        return [self._sent[message].what for message in missing if isinstance(message, tuple)]


def _edge(tensor: torch.Tensor) -> GradientEdge:
    """Return where the gradient of a tensor enters its graph."""
    if tensor.layout is torch.strided:
        if tensor.grad_fn is not None:
            return get_gradient_edge(tensor)
        with leaf_lock:
            return get_gradient_edge(tensor)
    copy = tensor.clone().grad_fn  # torch's way makes a view, and there are none of these
    assert copy is not None
    node, number = copy.next_functions[0]
    assert node is not None
    return GradientEdge(node, number, copy)


def no_gradients(what: str) -> RpcError:
    """Return the error about messages of a context that a backward pass does not reach."""
    return RpcError(
        "the result of a remote call got no gradient in this backward pass",
        op="backward",
        seen=what,
        fix="Let all results that need gradients take part in the loss, detach those that do not, "
        "or make such calls outside of the context.",
    )
