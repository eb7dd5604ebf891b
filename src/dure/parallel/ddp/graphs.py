"""What the running backward is, and what it will reach: questions to autograd.

DDP learns that a backward has begun when a gradient arrives at an output of the module. But so it
does in `torch.autograd.grad`, which hands gradients out and accumulates none (a gradient penalty
calls it, between forward and backward). Only autograd knows which it is, and it answers one
question: will this node of the graph be executed? For a parameter's accumulating node

* *yes* means that this is a backward that fills ``.grad``;
* an exception means `autograd.grad` with respect to this parameter;
* *no* means either that the call does not fill ``.grad`` or that it does not reach this parameter.

To tell the last two apart, the graph is followed from an output down to any leaf, which is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["at_end", "below", "fills_gradients", "in_backward", "task_id", "will_reach"]

# Looked up once: finding it takes longer than calling it.
at_end: Callable[[Callable[[], None]], None]
at_end = torch.autograd.Variable._execution_engine.queue_callback  # pyright: ignore
"""Have autograd call a function at the end of the backward that is running."""
_will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node  # pyright: ignore


def task_id() -> int:
    """Return the number of the backward that runs on this thread; -1 outside of any."""
    return torch._C._current_graph_task_id()  # pyright: ignore


def in_backward() -> bool:
    """Tell whether the calling thread is inside a backward (checkpoints run forward there)."""
    return task_id() >= 0


def will_reach(accumulator: Any) -> bool:
    """Tell whether the running backward adds to the gradient that `accumulator` fills.

    Any: autograd's nodes have no public type. To be called during a backward.
    """
    try:
        return _will_execute(accumulator)
    except RuntimeError:  # autograd.grad with respect to this very leaf
        return False


def below(node: Any) -> list[Any]:
    """Return the nodes that `node` hands gradients to (Any: nodes of the graph)."""
    return [n for n, _ in node.next_functions if n is not None]


def fills_gradients(accumulator: Any, nodes: Sequence[Any]) -> bool:
    """Tell whether the running backward fills gradients of leaves (Any: nodes of the graph).

    Args:
        accumulator: Of a parameter that is likely to be reached.
        nodes: Those below an output of the module, whose gradient has arrived.

    Cost:
        One question; where that does not decide, as many steps as the graph is deep.
    """
    try:
        if _will_execute(accumulator):
            return True
        leaf = _any_leaf(nodes)
        return leaf is not None and _will_execute(leaf)
    except RuntimeError:
        return False


def _any_leaf(nodes: Sequence[Any]) -> Any:
    """Follow the graph from `nodes` down to the first leaf that is found, depth first."""
    seen: set[Any] = set()
    waiting = list(reversed(nodes))
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            return node
        for child in reversed(below(node)):
            if child not in seen:
                seen.add(child)
                waiting.append(child)
    return None
