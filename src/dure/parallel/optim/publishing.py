"""How the new values of all shards come to all ranks, at the end of a step or within backward.

Three cases: one rank has nothing to publish; ranks that share the parameters (sharing.py) only
meet, for each has written where all read; all others exchange (exchange.py). What is exchanged are
the parameters that are trained, or have been: the rest never changes. Parameters that are unfrozen
later join the exchange at the next step.

*Within backward* (overlap.py) the parameters of one bucket after another are published: each is
started when it is updated, and the end of backward waits for all of them.

Autograd learns of every parameter that another rank has changed, so that an older graph which saved
it refuses to run, as after a step of an unsharded optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from dure.parallel.optim.exchange import BucketExchange, Exchange, NoExchange, StraightExchange

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.errors import CommError
    from dure.parallel.optim.holdings import Holdings

__all__ = ["Publisher", "explain"]


class Publisher:
    """Publishes the values of one optimizer's parameters.

    Args:
        group: The ranks.
        holdings: Who owns what.
        shared: The ranks of a host share the parameters.
        in_buckets: Keep parameters side by side in flat tensors (`BucketExchange`).

    Collective: `publish`, `start` and `wait`, on all ranks of the group in the same order.
    """

    def __init__(
        self, group: ProcessGroup, holdings: Holdings, shared: bool, in_buckets: bool
    ) -> None:
        self._group, self._holdings = group, holdings
        self._shared, self._in_buckets = shared, in_buckets
        self._exchanged: frozenset[int] = frozenset()
        self._under_way: list[StraightExchange] = []
        self.plan()

    def plan(self) -> None:
        """Plan for the parameters that are trained by now, and those that have been."""
        self._exchanged = self._exchanged.union(self._trained())
        self._exchange = self._planned()

    def _planned(self) -> Exchange:
        if self._group.size() == 1 or self._shared:
            return NoExchange()
        parameters = self._holdings.parameters
        owned = self._holdings.by_owner({parameters[i] for i in self._exchanged})
        kind = BucketExchange if self._in_buckets else StraightExchange
        return kind(self._group, owned)

    def _trained(self) -> list[int]:
        """Return the numbers of the parameters that may change."""
        parameters = self._holdings.parameters
        return [i for i, p in enumerate(parameters) if p.requires_grad or p.grad is not None]

    def publish(self) -> None:
        """Let all ranks have all new values."""
        if self._shared:
            self._group.barrier()
        else:
            if not self._exchanged.issuperset(self._trained()):
                self.plan()
            self._exchange.run()
        self.tell_autograd(self._holdings.parameters)

    def start(self, parameters: Sequence[torch.Tensor]) -> None:
        """Begin to publish `parameters`, the same on all ranks; `wait` waits for them."""
        if not self._shared and self._group.size() > 1:
            owned = self._holdings.by_owner(set(parameters))
            exchange = StraightExchange(self._group, owned)
            exchange.start()
            self._under_way.append(exchange)

    def wait(self) -> None:
        """Wait for all that was started."""
        while self._under_way:
            self._under_way.pop(0).finish()

    def tell_autograd(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let autograd know which of `parameters` other ranks have changed."""
        torch.autograd.graph.increment_version(self._holdings.others_among(parameters))


def explain(error: CommError) -> None:
    """Say what an error in the midst of a step means for the parameters."""
    error.advise("The parameters may be half updated: go on from a checkpoint, not from these.")
