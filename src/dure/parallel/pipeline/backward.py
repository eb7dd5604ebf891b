"""Backward of a stage: at once, or gradients of inputs first and those of weights later.

Note "Split backward". Backward walks the graph from the outputs to the leaves. A node from which
inputs can be reached is on the *spine*; from it branch off subgraphs that reach weights only. The
first half walks the spine alone, and keeps the gradients that arrive at each node with branches.
The second half starts at those nodes and walks the branches. A node with a branch (the product of a
linear layer) is visited twice, and computes each of its gradients once; nothing is computed twice.
Hooks of the node and of its output run in both halves, but what arrives in the second half is what
they made of it in the first: a hook that doubles a gradient does so once.

    output - linear - relu - linear - input          spine
                |              |
              weight         weight                  branches

A weight that branches off at several nodes, one of which is reached from another, would be counted
twice; it gets its gradient in the first half. So do all weights where a node runs Python that calls
backward itself (reentrant checkpoints). Learnt from torch.distributed.pipelining, `_backward.py`,
and "Zero Bubble Pipeline Parallelism" (arxiv.org/abs/2401.10241).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["Edges", "WeightBackward", "backward", "edges_of", "input_backward"]

Gradients = Sequence[torch.Tensor | None]
Edges = Sequence[GradientEdge | None]


class WeightBackward:
    """The second half of a backward: call it once.

    Attributes:
        parts: Where it walks from, the gradients that arrived there, and to which weights (None: to
            all).
        visited: Nodes of the first half, and all that arrived there, after hooks.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[list[GradientEdge], Gradients, list[torch.Tensor] | None]] = []
        self.visited: dict[Any, tuple[torch.Tensor | None, ...]] = {}

    def __call__(self) -> None:
        """Add to the gradients of the weights."""
        while self.parts:
            edges, gradients, weights = self.parts.pop(0)
            node = edges[0].node
            arrived = self.visited.pop(node, None)
            # The last of the node's hooks: it puts aside what the others do a second time.
            hook = None if arrived is None else node.register_prehook(partial(_replace, arrived))
            try:
                torch.autograd.backward(edges, gradients, inputs=weights)
            finally:
                if hook is not None:
                    hook.remove()


def edges_of(outputs: Sequence[torch.Tensor]) -> list[GradientEdge | None]:
    """Return where a backward of `outputs` will begin: their memory is not kept for it."""
    return [get_gradient_edge(t) if t.requires_grad else None for t in outputs]


def backward(
    outputs: Edges, gradients: Gradients, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Run backward in one part; return the gradients of `inputs`, which are leaves.

    Args:
        outputs: Where backward begins; None where no gradient is needed.
        gradients: Of the outputs; where None, the output had no part in the loss.
        inputs: Leaves; those that need no gradient get None.
    """
    roots = _roots(outputs, gradients)
    if roots:
        torch.autograd.backward([edge for edge, _ in roots], [g for _, g in roots])
    return _take_gradients(inputs)


def input_backward(
    outputs: Edges, gradients: Gradients, inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], WeightBackward]:
    """Run the first half of a backward; return the inputs' gradients, and the second half.

    See the note "Split backward". Memory that the graph has saved is kept until the second half.
    """
    rest, roots = WeightBackward(), _roots(outputs, gradients)
    wanted = [t for t in inputs if t.requires_grad]
    if not wanted or not roots:
        if roots:
            rest.parts.append(([edge for edge, _ in roots], [g for _, g in roots], None))
        return [None] * len(inputs), rest
    graph = _Graph(roots, wanted)
    if graph.is_opaque:
        return backward(outputs, gradients, inputs), rest
    kept: dict[Any, tuple[torch.Tensor | None, ...]] = {}
    hooks = [node.register_prehook(partial(_keep, kept, node)) for node in graph.branches]
    try:
        torch.autograd.backward(
            [edge for edge, _ in roots],
            [g for _, g in roots],
            inputs=[*wanted, *graph.shared],
            retain_graph=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    for node, arrived in kept.items():
        edges = [GradientEdge(node, i) for i, g in enumerate(arrived) if g is not None]
        given = [g for g in arrived if g is not None]
        rest.parts.append((edges, given, graph.branches[node]))
        rest.visited[node] = arrived
    for edge, gradient in graph.weight_roots:
        rest.parts.append(([edge], [gradient], graph.weights_below(edge)))
    return _take_gradients(inputs), rest


def _take_gradients(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of a stage's inputs, and leave those that it was handed without."""
    found = [tensor.grad if tensor.requires_grad else None for tensor in inputs]
    for tensor in inputs:
        if tensor.requires_grad:
            tensor.grad = None
    return found


def _keep(
    kept: dict[Any, tuple[torch.Tensor | None, ...]],
    node: Any,
    arrived: tuple[torch.Tensor | None, ...],
) -> None:
    kept[node] = arrived


def _replace(
    arrived: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    return arrived


def _roots(outputs: Edges, gradients: Gradients) -> list[tuple[GradientEdge, torch.Tensor]]:
    """Return where backward begins; a tensor that was handed out twice, once."""
    roots: dict[tuple[Any, int], tuple[GradientEdge, torch.Tensor]] = {}
    for edge, gradient in zip(outputs, gradients, strict=True):
        if edge is None or gradient is None:
            continue
        key = (edge.node, edge.output_nr)
        before = roots.get(key)
        roots[key] = (edge, gradient if before is None else before[1] + gradient)
    return list(roots.values())


class _Graph:
    """The graph under a stage's outputs: its spine, and what branches off.

    A weight is any leaf that is not among the inputs.

    Attributes:
        branches: For each node of the spine with branches, the weights that they reach.
        shared: Weights that branch off at several nodes.
        weight_roots: Outputs that reach weights only, with their gradients.
        is_opaque: A node calls backward itself.
    """

    def __init__(
        self,
        roots: Sequence[tuple[GradientEdge, torch.Tensor]],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self._inputs = {get_gradient_edge(t).node for t in inputs}
        self._order = self._children_first([edge.node for edge, _ in roots])
        self.is_opaque = any("CheckpointFunction" in type(n).__name__ for n in self._order)
        self._spine: set[Any] = set()
        self._below: dict[Any, set[Any]] = {}
        self._weights: dict[Any, torch.Tensor] = {}
        for node in self._order:
            children = [child for child, _ in node.next_functions if child is not None]
            if node in self._inputs or any(child in self._spine for child in children):
                self._spine.add(node)
            elif hasattr(node, "variable"):
                self._weights[node] = node.variable
                self._below[node] = {node}
            else:
                reached = [self._below[child] for child in children]
                self._below[node] = set[Any]().union(*reached)
        self._find_branches()
        self.weight_roots = [r for r in roots if r[0].node not in self._spine]

    def _children_first(self, roots: Sequence[Any]) -> list[Any]:
        order: list[Any] = []
        seen: set[Any] = set()
        stack: list[tuple[Any, bool]] = [(node, False) for node in roots]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                children = (child for child, _ in node.next_functions)
                stack += [(c, False) for c in children if c is not None and c not in seen]
        return order

    def _find_branches(self) -> None:
        met: dict[Any, int] = {}
        reached: dict[Any, set[Any]] = {}
        for node in self._spine:
            below: set[Any] = set()
            for child, _ in node.next_functions:
                if child is not None and child not in self._spine:
                    below |= self._below[child]
            if below:
                reached[node] = below
            for leaf in below:
                met[leaf] = met.get(leaf, 0) + 1
        self.shared = [self._weights[leaf] for leaf, times in met.items() if times > 1]
        self.branches = {
            node: [self._weights[leaf] for leaf in below if met[leaf] == 1]
            for node, below in reached.items()
            if any(met[leaf] == 1 for leaf in below)
        }

    def weights_below(self, edge: GradientEdge) -> list[torch.Tensor]:
        """Return the weights that an output reaches which reaches no input."""
        return [self._weights[leaf] for leaf in self._below[edge.node]]
