"""The part of a distributed graph that is in one process, run piece by piece as gradients arrive.

A backward pass enters a process through *roots*: the tensors on which the user called `backward`,
and, for each message with tensors that left the process, those tensors. Their gradients arrive at
different times, and some only after gradients that this process must send first, so the graph
cannot run at once. Each node has a count of the edges and roots that lead to it and have brought no
gradient yet; a node with count 0 is *ready*, and runs when a root arrives, by one call of
torch's engine. So each node runs once, with its complete gradient, and its hooks are called once.

Leaves and the nodes of tensors that came from other processes are the ends: the engine *captures*
their gradients. Those of leaves go to the context instead of `.grad`, those of received tensors are
sent there.

**At a border**, an edge from a ready node to one that is not, the engine must stop. It executes the
nodes that lead to a captured end, and no others. So an end to which a node behind the border leads
is omitted, and nodes that lead to no other end stay ready for the next call. A node that runs, and
also leads to one behind the border, is called once more by itself, for the gradient that it passes
to that one (`_pass_on`). In most programs the only borders are at leaves, because roots share only
weights.

**Leaves** accumulate at the end of the pass, in one run of the engine (data parallelism relies on
that), with `.grad` set aside; their hooks, and those of their accumulating nodes, are called there.
The engine also calls the hooks of a tensor when it captures its gradient. Those of leaves are
removed for that time, because they would see partial gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.autograd.graph import GradientEdge, Node

from dure import torch_private

__all__ = ["Gradients", "LocalGraph", "aside", "edge_of", "place", "with_grads"]

Gradients = tuple[torch.Tensor | None, ...]

Root = TypeVar("Root", bound=Hashable)

_COPIED_BYTES = 64 << 10
"""Gradients of leaves up to this total are copied; larger or sparse ones are moved (`_Handing`)."""

_change = threading.Condition()
_aside: dict[int, int] = {}
"""The leaves, by `id`, whose hooks or `.grad` are set aside, each with the thread that does it."""

_ELSEWHERE = (
    "these gradients belong to another process: call dure.autograd.backward(context_id, [loss]) "
    "for a loss that depends on remote calls, once, or with retain_graph=True"
)
_delayed: Any = torch_private.DelayedError
"""A node of torch, made without its dispatcher, that raises an error when it is executed."""

_alone = _delayed(_ELSEWHERE, 1)
_anchor = torch.empty(0, requires_grad=True, device="cpu")
"""Makes received tensors part of a graph."""

_alias: Any = torch.ops.aten.alias.default

_run: Any = torch_private.execution_engine.run_backward
"""torch's engine, without the checks and logs of `torch.autograd.backward`."""


def place(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of another process as part of this process's graph; they share memory.

    All have one node, which is never executed: `LocalGraph` captures its gradients.
    """
    leaves = [tensor.requires_grad_(False) for tensor in tensors]  # else it would keep their memory
    *placed, _ = _delayed(_ELSEWHERE, len(leaves) + 1)(*leaves, _anchor)
    return placed


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """Return the edge at which the gradient of a tensor enters its graph; needs grad mode."""
    if tensor.grad_fn is not None:
        return GradientEdge(tensor.grad_fn, tensor.output_nr)
    # What is computed of a leaf leads to its node; here without torch's dispatcher, and without
    # Python's lock, for which another thread may wait that has a lock of the leaf's.
    return GradientEdge(*_alone(tensor).grad_fn.next_functions[0])


@contextmanager
def aside(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Reserve the hooks and `.grad` of these leaves for this thread, for a block; waits for all.

    There is not one lock for all leaves: hooks that run in the block may wait for other processes
    (data parallelism does), and these for another thread of this process.
    """
    me = threading.get_ident()
    with _change:
        _change.wait_for(lambda: all(_aside.get(id(leaf), me) == me for leaf in leaves))
        taken = {id(leaf) for leaf in leaves} - _aside.keys()
        _aside.update(dict.fromkeys(taken, me))
    try:
        yield
    finally:
        with _change:
            for leaf in taken:
                del _aside[leaf]
            _change.notify_all()


def with_grads(
    leaves: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    work: Callable[[], object],
) -> list[torch.Tensor | None]:
    """Call a function while leaves have other gradients as `.grad`; return these afterwards."""
    with aside(leaves):
        kept = [leaf.grad for leaf in leaves]
        try:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
            work()
            return [leaf.grad for leaf in leaves]
        finally:
            for leaf, before in zip(leaves, kept, strict=True):
                leaf.grad = before


class LocalGraph(Generic[Root]):
    """One backward pass through this process.

    Args:
        roots: For each root the edges at which its gradients enter, in their order.
        received: The nodes whose gradients are sent to other processes, and for how many tensors.
        retain_graph: Whether the graph can run again afterwards.

    Attributes:
        roots: As given.
        missing: The roots whose gradients have not arrived.
        leaves: The gradients of leaves, when those of all roots have arrived.
        received: The received nodes that a root reaches.
        unreached: The others.

    Threads:
        One at a time.

    Cost:
        Some microseconds a node, and at most one call of torch's engine a root.
    """

    def __init__(
        self,
        roots: Mapping[Root, Sequence[GradientEdge]],
        received: Mapping[Node, int],
        retain_graph: bool = False,
    ) -> None:
        self.roots, self._sizes, self._retain = roots, received, retain_graph
        self.missing: dict[Root, None] = dict.fromkeys(roots)
        self.leaves: dict[torch.Tensor, torch.Tensor] = {}
        self._gradients: dict[GradientEdge, torch.Tensor] = {}  # for nodes that have not run
        self._ready: dict[Node, None] = {}  # and have not run; each after those that lead to it
        self._counts: dict[Node, int] = {}
        self._next: dict[Node, list[Node]] = {}
        self._variables: dict[Node, torch.Tensor] = {}  # of the leaves' nodes
        stack = [edge.node for edges in roots.values() for edge in edges]
        while stack:
            node = stack.pop()
            if node in self._counts:
                self._counts[node] += 1
                continue
            self._counts[node] = 1
            following = () if node in received else node.next_functions
            self._next[node] = after = [each for each, _ in following if each is not None]
            stack += after
            if not after and hasattr(node, "variable"):
                self._variables[node] = node.variable  # pyright: ignore
        self.received = received.keys() & self._counts.keys()
        self.unreached = received.keys() - self.received
        self._due = set(self.received)

    def arrive(self, root: Root, gradients: Sequence[torch.Tensor | None]) -> dict[Node, Gradients]:
        """Add the gradients of a root, and run the nodes that are ready.

        Returns:
            For each received node whose gradients are complete now, those of its outputs.
        """
        del self.missing[root]
        for edge, gradient in zip(self.roots[root], gradients, strict=True):
            self._add(edge, gradient)
        if self.missing:
            return self._run_ready(root)
        complete = self._execute(self._next.keys(), self._variables, ())
        self._accumulate()
        return complete

    def _run_ready(self, root: Root) -> dict[Node, Gradients]:
        """Run the nodes that are ready while some roots are missing."""
        stack = [edge.node for edge in self.roots[root]]
        while stack:
            node = stack.pop()
            self._counts[node] -= 1
            if self._counts[node] == 0 and node not in self._variables:
                self._ready[node] = None
                stack += self._next[node]
        after = {each for node in self._ready for each in self._next[node]}
        border = [n for n in after if n not in self._ready and n not in self._variables]
        behind = set(border)
        while border:
            new = set(self._next[border.pop()]) - behind
            behind |= new
            border += new
        leaves = {node for node in after if node in self._variables and node not in behind}
        run: set[Node] = set()
        for node in reversed(self._ready):
            if node in self._due or any(n in run or n in leaves for n in self._next[node]):
                run.add(node)
        for node in run:
            del self._ready[node]
        shared = [n for n in run if any(f not in run and f not in leaves for f in self._next[n])]
        return self._execute(run, leaves, shared)

    def _execute(
        self, nodes: Collection[Node], leaves: Collection[Node], shared: Collection[Node]
    ) -> dict[Node, Gradients]:
        """Have the engine execute nodes; return as `arrive`.

        Args:
            nodes: The nodes; leaves among them are omitted.
            leaves: Leaves to which only these nodes lead.
            shared: The nodes that also lead to nodes that do not run.
        """
        due = [node for node in self._due if node in nodes]
        self._due.difference_update(due)
        edges = [e for e in self._gradients if e[0] in nodes and e[0] not in self._variables]
        if not edges:
            return {node: (None,) * self._sizes[node] for node in due}
        gradients = tuple([self._gradients.pop(edge) for edge in edges])
        entries = [GradientEdge(node, 0) for node in leaves]
        ends = (
            *[GradientEdge(node, n) for node in due for n in range(self._sizes[node])],
            *entries,
        )
        got: dict[Node, Gradients] = {}
        notes = [n.register_hook(lambda _, g, n=n: got.update({n: g})) for n in shared]
        run = partial(_run, tuple(edges), gradients, self._retain or bool(shared), False, ends)
        try:
            captured = iter(_without_hooks([self._variables[node] for node in leaves], run))
        finally:
            for note in notes:
                note.remove()
        complete: dict[Node, Gradients] = {
            node: tuple([next(captured) for _ in range(self._sizes[node])]) for node in due
        }
        for edge, gradient in zip(entries, captured, strict=True):
            self._add(edge, gradient)
        for node, passed in got.items():
            self._pass_on(node, passed, {*nodes, *leaves})
        return complete

    def _pass_on(self, node: Node, got: Gradients, known: set[Node]) -> None:
        """Compute the gradients that a node passes to nodes that the engine does not run."""
        given = [
            _zeros(node, number) if gradient is None else gradient
            for number, gradient in enumerate(got)
        ]
        with torch.no_grad():
            passed = getattr(node, "apply", node)(*given)  # pyright: ignore[reportCallIssue]
        if not isinstance(passed, tuple):
            passed = (passed,)
        for (following, number), gradient in zip(node.next_functions, passed, strict=False):
            if following is not None and following not in known:
                self._add(GradientEdge(following, number), gradient)

    def _add(self, edge: GradientEdge, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            before = self._gradients.get(edge)
            self._gradients[edge] = gradient if before is None else before + gradient

    def _accumulate(self) -> None:
        """Accumulate the gradients of leaves: in `leaves`, not in `.grad`."""
        edges, gradients = tuple(self._gradients), [*self._gradients.values()]
        self._gradients.clear()
        if not edges:
            return
        leaves = [self._variables[edge.node] for edge in edges]
        nbytes = sum([each.numel() * each.itemsize for each in gradients])
        handed = nbytes > _COPIED_BYTES or any(each.is_sparse for each in gradients)
        if handed and all(leaf.layout is torch.strided for leaf in leaves):  # others: no aliases
            with torch.enable_grad():
                edges = (edge_of(_Handing.apply(gradients, *map(_alias, leaves))),)
            gradients = [_one]
        run = partial(_run, edges, tuple(gradients), False, False, (), True, True)
        got = with_grads(leaves, [None] * len(leaves), run)
        for leaf, gradient in zip(leaves, got, strict=True):
            if gradient is not None:
                self.leaves[leaf] = gradient


_one = torch.ones((), device="cpu")


class _Handing(torch.autograd.Function):
    """Moves gradients to leaves without holding them, so that they need not be copied.

    Its inputs are aliases. If they were the leaves, this function would hold Python's lock while it
    waits for a lock of torch; another thread that computes with the leaf holds that one and waits
    for Python's: a deadlock.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *leaves: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.empty((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore
        gradients, ctx.gradients = ctx.gradients, ()
        return None, *gradients


def _zeros(node: Node, number: int) -> torch.Tensor:
    made = node._input_metadata[number]  # pyright: ignore
    return torch.zeros(made.shape, dtype=made.dtype, device=made.device)


def _without_hooks(leaves: list[torch.Tensor], run: Callable[..., Any]) -> Any:
    """Have the engine capture gradients, without calling the hooks of leaves."""
    hooked = [leaf for leaf in leaves if leaf._backward_hooks is not None]  # empty: set aside
    if not hooked:
        return run(True, False)
    with aside(hooked):
        tables: list[Any] = [leaf._backward_hooks for leaf in hooked]
        kept = [dict(table) for table in tables]
        try:
            for table in tables:
                table.clear()
            return run(True, False)
        finally:
            for table, hooks in zip(tables, kept, strict=True):
                table.update(hooks)
