"""One backward through sharded modules: what it has noticed, and what it still has to deliver."""

from __future__ import annotations

from dataclasses import dataclass, field

from dure.parallel.fsdp.group import Delivery
from dure.parallel.fsdp.order import Order
from dure.parallel.fsdp.parameter import FSDPParameter

__all__ = ["Backward"]


@dataclass(slots=True, eq=False)
class Backward:
    """One backward through modules of a tree.

    Attributes:
        gathers, reductions: The orders that it keeps to.
        keeps_graph: Another backward may go through its graph (``retain_graph``).
        makes_graph: It makes a graph of what it computes (``create_graph``).
        stale: Parameters that were written after forward, which this backward may have read
            before it was noticed.
        deliveries: Gradients that hooks of the program wait for until the end.
        has_failed: It has raised: autograd reports no end.
    """

    gathers: Order
    reductions: Order
    keeps_graph: bool = False
    makes_graph: bool = False
    stale: set[FSDPParameter] = field(default_factory=set[FSDPParameter])
    deliveries: list[Delivery] = field(default_factory=list[Delivery])
    has_failed: bool = False

    @property
    def checks_gradients(self) -> bool:
        """Whether each gradient of a parameter is to be looked at."""
        return self.has_failed or self.makes_graph or bool(self.stale)
