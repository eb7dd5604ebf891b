"""The part of a distributed graph that is in one process, run piece by piece as gradients arrive.

A backward pass enters a process through *roots*: the tensors on which the user called `backward`,
and, for each message with tensors that left the process, those tensors. Their gradients come at
different times, and some of them only after gradients that this process must send first. So the
graph cannot be run at once. It is cut:

    the *mask* of a node is the set of roots from which it is reached;
    a *segment* is all nodes of one mask.

Along the graph masks only grow. A segment runs, by one call of torch's engine, when all roots of
its mask have their gradients; what flows out of it, into nodes of larger masks, is summed until
those run. So each node runs once, with its whole gradient, and its hooks are called once. Where no
edge leads from one segment into another, as in most programs, a segment is just run to its ends.

Leaves and the nodes of tensors that came from other processes are the ends: the gradients of leaves
go to the context instead of `.grad`, those of received tensors are sent there.

**What the engine does at a border.** It is asked to *capture* the gradients there. A captured node
is not executed, unless it leads to another one that is captured. So only those borders are captured
that no other leads to; a node that also passes gradients on to others is called once more, by
itself, for these (`_pass_on`).

**Hooks.** The engine calls the hooks of a tensor where it captures its gradient. At a border they
would see parts of it, and be called for each. So they are set aside while a segment runs, and are
called when the node behind the border is executed. Autograd does not tell which hooks a node has:
leaves name their tensor; for all others `Tensor.register_hook` is followed (`follow_hooks`). Hooks
of leaves, those of their accumulating nodes included, are called at the end of the pass, in one run
of the engine (data parallelism counts on that), with `.grad` set aside.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import (
    GradientEdge,
    Node,
    _engine_run_backward,  # pyright: ignore[reportPrivateUsage]: without what `backward` checks
    get_gradient_edge,
)

from dure.errors import UsageError

__all__ = ["Gradients", "LocalGraph", "follow_hooks", "leaf_lock", "place"]

Gradients = tuple[torch.Tensor | None, ...]

_HOOKS = "dure.hooks"
"""In a node's metadata: the tables of hooks of the tensors that it made."""

_aside_lock = threading.RLock()
"""Held while hooks, or `.grad`, are set aside."""

leaf_lock = threading.Lock()
"""Held while the engine is asked for the node of a leaf: torch takes its own lock and Python's
in either order there, and two threads that ask at once may never come back."""


def follow_hooks() -> None:
    """From now on, let nodes know of the hooks that are registered on their tensors.

    Wraps `torch.Tensor.register_hook`, once a process.
    """
    plain = torch.Tensor.register_hook
    if hasattr(plain, _HOOKS):
        return

    @functools.wraps(plain)
    def register_hook(self: torch.Tensor, hook: Any) -> Any:
        handle = plain(self, hook)
        if self.grad_fn is not None:
            _metadata(self.grad_fn).setdefault(_HOOKS, []).append(self._backward_hooks)
        return handle

    setattr(register_hook, _HOOKS, True)
    torch.Tensor.register_hook = register_hook  # pyright: ignore[reportAttributeAccessIssue]


def place(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return tensors of another process as those of this process's graph; they share memory.

    All have one node, which is never executed: `LocalGraph` takes the gradients that come to it.
    """
    return _FromElsewhere.apply(_anchor, tensors)


class LocalGraph:
    """One backward pass through this process.

    Args:
        roots: For each root the edges at which its gradients enter, in their order.
        received: The nodes whose gradients are sent to other processes.
        retain_graph: Whether the graph can be run once more afterwards.

    Attributes:
        roots: As given.
        leaves: The gradients of leaves, when all segments have run.
        received: Those of the nodes given that some root reaches.
        unreached: The others.

    Threads: one at a time.

    Cost:
        Some microseconds a node, and one call of torch's engine a segment.
    """

    def __init__(
        self,
        roots: Mapping[Hashable, Sequence[GradientEdge]],
        received: Collection[Node],
        retain_graph: bool = False,
    ) -> None:
        self.roots, self._retain = roots, retain_graph
        self._bits = {root: 1 << n for n, root in enumerate(roots)}
        ends = set(received)
        self._masks, self._whole = _masks(
            {self._bits[root]: edges for root, edges in roots.items()}, ends
        )
        self.received = ends & self._masks.keys()
        self._arrived = 0
        self._gradients: dict[tuple[Node, int], torch.Tensor] = {}  # to run the segments with
        self._segments: dict[int, list[Node]] = {}  # those that have not run
        for node, mask in self._masks.items():
            self._segments.setdefault(mask, []).append(node)
        self.leaves: dict[torch.Tensor, torch.Tensor] = {}
        self.unreached = ends - self.received

    @property
    def done(self) -> bool:
        """Whether all segments have run."""
        return not self._segments

    @property
    def missing(self) -> list[Hashable]:
        """The roots whose gradients have not come."""
        return [root for root, bit in self._bits.items() if not self._arrived & bit]

    def arrive(
        self, root: Hashable, gradients: Sequence[torch.Tensor | None]
    ) -> dict[Node, Gradients]:
        """Take the gradients of a root, and run what can be run.

        Returns:
            For each received node whose gradients are complete now, those of its outputs.
        """
        self._arrived |= self._bits[root]
        for edge, gradient in zip(self.roots[root], gradients, strict=True):
            self._add(edge.node, edge.output_nr, gradient)
        ready = [mask for mask in self._segments if mask & ~self._arrived == 0]
        complete: dict[Node, Gradients] = {}
        for mask in sorted(ready, key=int.bit_count):
            nodes = self._segments.pop(mask)
            inner = {node for node in nodes if not self._is_end(node)}
            if self._whole:
                self._execute(inner, _border(inner, inner), set())
            else:
                self._run(inner)
            complete |= {node: self._take(node) for node in nodes if node in self.received}
        if self.done:
            self._accumulate([node for node in self._masks if hasattr(node, "variable")])
        return complete

    def _is_end(self, node: Node) -> bool:
        return node in self.received or hasattr(node, "variable")

    # --- one segment -----------------------------------------------------------------------

    def _run(self, nodes: set[Node]) -> None:
        """Run the nodes of a segment: first those that lead to borders that no other leads to."""
        while begin := {node for node, _ in self._gradients if node in nodes}:
            reached = [node for node in _in_order(begin, nodes) if node in nodes]
            border = _border(reached, nodes)
            beyond = _behind({following for following, _ in border})
            first = [edge for edge in border if edge[0] not in beyond]
            targets = {following for following, _ in first}
            run: set[Node] = set()
            for node in reversed(reached):
                if any(following in targets for following, _ in node.next_functions):
                    run.add(node)
                    targets.add(node)
            self._execute(run, first, targets)
            nodes = nodes - (run or nodes)

    def _execute(
        self, nodes: set[Node], border: Collection[tuple[Node, int]], targets: set[Node]
    ) -> None:
        """Have the engine execute nodes, as far as the border, once.

        Args:
            nodes: These.
            border: The edges whose gradients are wanted.
            targets: Those of `nodes`, and behind the border, that lead to it; none: all do.
        """
        seeds = [edge for edge in self._gradients if edge[0] in nodes]
        if not seeds:
            return
        shared = [  # those that pass gradients on to others as well
            node
            for node in nodes
            if targets and any(f is not None and f not in targets for f, _ in node.next_functions)
        ]
        got: dict[Node, Gradients] = {}
        with ExitStack() as stack:
            for node in shared:
                hook = node.register_hook(functools.partial(_note, got, node))
                stack.callback(hook.remove)
            stack.enter_context(_aside(node for node, _ in border))
            found = _engine_run_backward(
                tuple(_edge(*seed) for seed in seeds),
                tuple(self._gradients.pop(seed) for seed in seeds),
                self._retain or bool(shared),
                False,
                tuple(_edge(*edge) for edge in border),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        for edge, gradient in zip(border, found, strict=True):
            self._add(*edge, gradient)
        for node, gradients in got.items():
            self._pass_on(node, gradients, targets)

    def _pass_on(self, node: Node, got: Gradients, known: set[Node]) -> None:
        """Find the gradients that a node passes on to others than the engine was told of."""
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
                self._add(following, number, gradient)

    def _add(self, node: Node, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            before = self._gradients.get((node, number))
            self._gradients[node, number] = gradient if before is None else before + gradient

    # --- the ends --------------------------------------------------------------------------

    def _take(self, node: Node) -> Gradients:
        """Return the gradients of a received node, after the hooks of its tensors."""
        numbers = range(len(_outputs(node)))
        edges = {n: _edge(node, n) for n in numbers if (node, n) in self._gradients}
        if not edges:
            return ()
        given = [self._gradients.pop((node, n)) for n in edges]
        if not any(_metadata(node).get(_HOOKS, ())):
            found = dict(zip(edges, given, strict=True))
            return tuple(found.get(n) for n in numbers)
        ends = [*edges.values()]
        found = dict(zip(edges, torch.autograd.grad(ends, ends, given), strict=True))
        return tuple(found.get(n) for n in numbers)

    def _accumulate(self, nodes: list[Node]) -> None:
        """Let leaves have their gradients: in `leaves`, not in `.grad`."""
        nodes = [node for node in nodes if (node, 0) in self._gradients]
        if not nodes:
            return
        tensors: list[torch.Tensor] = [node.variable for node in nodes]  # pyright: ignore
        with torch.enable_grad(), leaf_lock:
            handing = _Handing.apply([self._gradients.pop((node, 0)) for node in nodes], *tensors)
        with _aside_lock:
            kept = [tensor.grad for tensor in tensors]
            try:
                for tensor in tensors:
                    tensor.grad = None
                how: dict[str, Any] = {"allow_unreachable": True, "accumulate_grad": True}
                _engine_run_backward((handing,), (_one,), False, False, (), **how)
                for tensor in tensors:
                    if tensor.grad is not None:
                        self.leaves[tensor] = tensor.grad
            finally:
                for tensor, before in zip(tensors, kept, strict=True):
                    tensor.grad = before


class _FromElsewhere(torch.autograd.Function):
    """Where tensors of another process enter the graph."""

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


_anchor = torch.empty(0, requires_grad=True)
"""Makes the engine see results of `_FromElsewhere` as part of a graph."""

_anchor_edge = get_gradient_edge(_anchor)  # kept: see `leaf_lock`

_one = torch.ones(())


class _Handing(torch.autograd.Function):
    """Hands gradients to leaves without holding them, so that they need not be copied."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *leaves: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore
        gradients, ctx.gradients = ctx.gradients, ()
        return None, *gradients


def _note(got: dict[Node, Gradients], node: Node, _: Gradients, gradients: Gradients) -> None:
    got[node] = gradients


def _edge(node: Node, number: int) -> GradientEdge:
    return GradientEdge(node, number)


def _metadata(node: Node) -> dict[str, Any]:
    return node.metadata  # pyright: ignore[reportReturnType]: a table, which torch types as a method


def _outputs(node: Node) -> Sequence[Any]:
    """Return shape, dtype and device of each tensor that the node made."""
    return node._input_metadata  # pyright: ignore[reportPrivateUsage]


def _zeros(node: Node, number: int) -> torch.Tensor:
    made = _outputs(node)[number]
    return torch.zeros(made.shape, dtype=made.dtype, device=made.device)


def _border(nodes: Iterable[Node], within: Collection[Node]) -> set[tuple[Node, int]]:
    """Return the edges that lead out of nodes and out of `within`."""
    return {
        (following, number)
        for node in nodes
        for following, number in node.next_functions
        if following is not None and following not in within
    }


def _masks(
    roots: Mapping[int, Sequence[GradientEdge]], ends: set[Node]
) -> tuple[dict[Node, int], bool]:
    """Return all nodes that are reached, each with the roots that reach it.

    And whether no edge leads from a node to one with another mask.
    """
    masks: dict[Node, int] = {}
    for bit, edges in roots.items():
        for edge in edges:
            masks[edge.node] = masks.get(edge.node, 0) | bit
    order = _in_order(list(masks), ends=ends)
    if len(roots) == 1:
        return dict.fromkeys(order, 1), True
    pairs: list[tuple[Node, Node]] = []
    for node in order:
        for following, _ in node.next_functions if node not in ends else ():
            if following is not None:
                masks[following] = masks.get(following, 0) | masks[node]
                pairs.append((node, following))
    return masks, all(masks[node] == masks[following] for node, following in pairs)


def _in_order(
    begin: Iterable[Node], within: Collection[Node] | None = None, ends: Collection[Node] = ()
) -> list[Node]:
    """Return all nodes that are reached, each before those that follow it.

    Args:
        begin: Where from.
        within: Go no further than these; None: to the end.
        ends: Go no further than one of these.
    """
    seen: set[Node] = set()
    order: list[Node] = []
    for first in begin:
        more = () if first in ends else first.next_functions
        stack = [(first, iter(more))] if first not in seen else []
        seen.add(first)
        while stack:
            node, rest = stack[-1]
            for following, _ in rest:
                if following is None or following in seen:
                    continue
                seen.add(following)
                if within is None or following in within:
                    more = () if following in ends else following.next_functions
                    stack.append((following, iter(more)))
                    break
            else:
                order.append(node)
                stack.pop()
    return order[::-1]


def _behind(border: set[Node]) -> set[Node]:
    """Return all nodes that some node of the border leads to."""
    if len(border) < 2:
        return set()
    return {
        following
        for node in _in_order(border)
        for following, _ in node.next_functions
        if following is not None
    }


@contextmanager
def _aside(nodes: Iterable[Node]) -> Iterator[None]:
    """Keep the hooks of the tensors at these nodes from being called."""
    tables: dict[int, Any] = {}
    for node in nodes:
        found: list[Any] = list(_metadata(node).get(_HOOKS, ()))
        tensor = getattr(node, "variable", None)
        if tensor is not None:
            found.append(tensor._backward_hooks)
        tables |= {id(table): table for table in found if table}
    if not tables:
        yield
        return
    with _aside_lock:
        kept = [(table, dict(table)) for table in tables.values()]
        try:
            for table, _ in kept:
                table.clear()
            yield
        finally:
            for table, hooks in kept:
                table.update(hooks)
