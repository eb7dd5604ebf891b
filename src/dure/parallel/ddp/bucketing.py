"""Which gradients travel together, and in what order: pure arithmetic, no tensors.

Backward produces gradients roughly in the reverse order of registration, one after the other. A
reduction for each of them would pay the fixed cost of a collective hundreds of times; one
reduction for all could only start when backward has ended. A *bucket* is the middle way: a run of
gradients, in that reverse order, that is reduced by one collective as soon as the last of them is
there, while backward goes on with the layers below.

Three rules make the plan:

* Gradients of one bucket have one *kind* (dtype and device), since they share one flat tensor.
* A bucket is closed once it holds at least its *cap* in bytes. The first one of each kind usually
  has a small cap, so that communication starts early, when the last layers are done.
* Buckets are numbered by the gradient that completes them. All ranks reduce them in this order,
  whatever order they become ready in, so that the ranks' collectives always match.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["FIRST_CAP_BYTES", "GradientSize", "plan_buckets"]

FIRST_CAP_BYTES = 1 << 20
"""Cap of the first bucket of each kind (the value of torch's DDP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSize:
    """What the planner needs to know of one gradient."""

    num_bytes: int
    kind: Hashable = None
    """Only gradients of equal kind may share a bucket."""


def plan_buckets(
    sizes: Sequence[GradientSize],
    *,
    caps: Sequence[int],
    order: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Divide gradients into buckets.

    Args:
        sizes: The gradients, in the order in which their parameters are registered.
        caps: A bucket is closed when it holds at least this many bytes: the first of each kind, the
            second, ...; the last number holds for all further ones.
        order: The order in which gradients are expected, as indices into `sizes`; by default the
            reverse of `sizes`.

    Returns:
        For each bucket the indices of its gradients, in the order in which they lie in it. The
        buckets are in the order in which they have to be reduced.
    """
    expected = range(len(sizes) - 1, -1, -1) if order is None else order
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    num_closed: dict[Hashable, int] = {}
    closed: list[tuple[int, tuple[int, ...]]] = []
    last_seen: dict[Hashable, int] = {}
    for position, index in enumerate(expected):
        size = sizes[index]
        kind = size.kind
        open_buckets.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + size.num_bytes
        last_seen[kind] = position
        number = num_closed.get(kind, 0)
        if filled[kind] >= caps[min(number, len(caps) - 1)]:
            closed.append((position, tuple(open_buckets.pop(kind))))
            filled[kind], num_closed[kind] = 0, number + 1
    closed += [(last_seen[kind], tuple(rest)) for kind, rest in open_buckets.items()]
    return tuple(indices for _, indices in sorted(closed))
