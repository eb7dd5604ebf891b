"""What a process keeps of a distributed backward pass: which tensors left, and which came.

In a context, each message with tensors that need gradients has an id. The sender keeps, under it,
where the gradients of those tensors enter its graph; the receiver gives the tensors a node of its
own (`FromElsewhere`), whose gradients are sent back to the sender under that id.

A backward pass begins on one process, with the tensors that the user named. Its gradients go from
process to process: each message with gradients is answered when all that it has set off has been
answered. So the first process knows when nothing is under way any more; and if its graph, or that
of another, has parts that have not run, then some message of the context got no gradients. As in
torch's FAST mode, all messages of a context take part in each backward pass of it.

Threads: the caller's lock guards a context; graphs run with it held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from dure.errors import RpcError
from dure.rpc.autograd.graph import Gradients, LocalGraph

__all__ = ["Context", "MessageId", "Outgoing"]

MessageId = tuple[int, int]
"""The process that sent a message, and a number of that process."""

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
    """

    number: int
    me: int
    workers: set[int] = field(default_factory=set[int])
    gradients: dict[torch.Tensor, torch.Tensor] = field(
        default_factory=dict[torch.Tensor, torch.Tensor]
    )
    _sent: dict[MessageId, _Sent] = field(default_factory=dict[MessageId, _Sent])
    _came: dict[Node, _Came] = field(default_factory=dict[Node, _Came])
    _graph: LocalGraph | None = None
    _roots: tuple[torch.Tensor, ...] = ()

    # --- forward -----------------------------------------------------------------------------

    def sends(self, message: MessageId, tensors: Sequence[torch.Tensor], to: int, what: str) -> int:
        """Take note of tensors that leave; return how many of them need gradients.

        Args:
            message: The message's id.
            tensors: All tensors of the message.
            to: Who receives it.
            what: The call, for people.
        """
        edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
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
        made = _FromElsewhere.apply(anchor, *(tensors[n].detach() for n in needing))
        placed = list(tensors)
        for n, tensor in zip(needing, made, strict=True):
            placed[n] = tensor
        node = made[0].grad_fn
        self._came[node] = _Came(message, sender, what, anchor)
        return placed

    # --- backward ----------------------------------------------------------------------------

    def begin(self, roots: Sequence[torch.Tensor], retain_graph: bool) -> list[Outgoing]:
        """Begin a backward pass here; return the gradients that can be sent.

        Args:
            roots: Scalars of this process's graph.
            retain_graph: Whether there will be another pass.

        Raises:
            RpcError: A message of the context gets no gradients.
        """
        self._roots = tuple(roots)
        self._graph = None
        graph = self._begun(retain_graph)
        ones = [torch.ones_like(root) for root in roots]
        return self._outgoing(graph, _ROOTS, ones)

    def arrive(
        self, message: MessageId, gradients: Sequence[torch.Tensor | None], retain_graph: bool
    ) -> list[Outgoing]:
        """Take the gradients of tensors that left; return those that can be sent now.

        Raises:
            RpcError: A message of the context gets no gradients.
        """
        return self._outgoing(self._begun(retain_graph), message, gradients)

    def end(self) -> str:
        """End a pass when nothing is under way; return what got no gradients, or nothing."""
        graph, self._graph, self._roots = self._graph, None, ()
        if graph is None or graph.done:
            return ""
        missing = [self._sent[root].what for root in graph.missing if isinstance(root, tuple)]
        return "; ".join(missing)

    def _begun(self, retain_graph: bool) -> LocalGraph:
        if self._graph is None:
            roots: dict[Any, list[GradientEdge]] = {m: s.edges for m, s in self._sent.items()}
            if self._roots:
                roots[_ROOTS] = [get_gradient_edge(root) for root in self._roots]
            self._graph = LocalGraph(roots, self._came, retain_graph)
            unreached = [self._came[node].what for node in self._graph.unreached]
            if unreached:
                raise no_gradients("; ".join(unreached))
        return self._graph

    def _outgoing(
        self, graph: LocalGraph, root: Any, gradients: Sequence[torch.Tensor | None]
    ) -> list[Outgoing]:
        found = graph.arrive(root, gradients)
        for leaf, gradient in graph.leaves.items():
            before = self.gradients.get(leaf)
            self.gradients[leaf] = gradient if before is None else before + gradient
        graph.leaves.clear()
        for came in self._came.values():
            self.gradients.pop(came.anchor, None)
        return [
            Outgoing(self._came[node].sender, self._came[node].message, got or ())
            for node, got in found.items()
        ]


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
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, ...]:
        return (None,) * (1 + len(gradients))
