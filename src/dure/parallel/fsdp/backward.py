"""One backward through sharded modules: its observations, and the gradients to deliver."""

from __future__ import annotations

from dataclasses import dataclass, field

from dure.parallel.fsdp.group import Delivery
from dure.parallel.fsdp.order import ExecutionOrder
from dure.parallel.fsdp.parameter import FSDPParameter

__all__ = ["Backward"]


@dataclass(slots=True, eq=False)
class Backward:
    """One backward through modules of a tree.

    Attributes:
        unshard_order, reduce_order: The orders that it follows.
        keeps_graph: Another backward may run through the same graph (``retain_graph``).
        makes_graph: It builds a graph of its own computation (``create_graph``).
        stale: Parameters that were written after forward, and that this backward may have read
            before the write was noticed.
        deliveries: Gradients for hooks of the program that run at the end of backward.
        has_failed: It has raised, so autograd will not report its end.
    """

    unshard_order: ExecutionOrder
    reduce_order: ExecutionOrder
    keeps_graph: bool = False
    makes_graph: bool = False
    stale: set[FSDPParameter] = field(default_factory=set[FSDPParameter])
    deliveries: list[Delivery] = field(default_factory=list[Delivery])
    has_failed: bool = False

    @property
    def checks_gradients(self) -> bool:
        """Whether each gradient of a parameter must be checked."""
        return self.has_failed or self.makes_graph or bool(self.stale)
