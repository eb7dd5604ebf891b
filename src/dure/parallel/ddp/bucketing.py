"""Which gradients travel together, and in what order: pure arithmetic, no tensors.

Backward produces gradients roughly in the reverse order of registration, one after the other. A
reduction for each of them would pay the fixed cost of a collective hundreds of times; one
reduction for all could only start when backward has ended. A *bucket* is the middle way: a run of
gradients, in that reverse order, that is reduced by one collective as soon as the last of them is
there, while backward goes on with the layers below.

Three rules make the plan:

* Gradients of one bucket have one *kind* (dtype and device), since they share one flat tensor.
* A bucket is closed once it holds at least its *cap* in bytes. The first one of each kind has a
  small cap, so that communication starts early, when the last layers are done.
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
    cap_bytes: int,
    first_cap_bytes: int = FIRST_CAP_BYTES,
    order: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Divide gradients into buckets.

    Args:
        sizes: The gradients, in the order in which their parameters are registered.
        cap_bytes: A bucket is closed when it holds at least this many bytes.
        first_cap_bytes: The same for the first bucket of each kind; never more than `cap_bytes`.
        order: The order in which gradients are expected, as indices into `sizes`; by default the
            reverse of `sizes`.

    Returns:
        For each bucket the indices of its gradients, in the order in which they lie in it. The
        buckets are in the order in which they have to be reduced.
    """
    expected = range(len(sizes) - 1, -1, -1) if order is None else order
    first_cap = min(first_cap_bytes, cap_bytes)
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    caps: dict[Hashable, int] = {}
    closed: list[tuple[int, tuple[int, ...]]] = []
    last_seen: dict[Hashable, int] = {}
    for position, index in enumerate(expected):
        size = sizes[index]
        kind = size.kind
        open_buckets.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + size.num_bytes
        last_seen[kind] = position
        if filled[kind] >= caps.get(kind, first_cap):
            closed.append((position, tuple(open_buckets.pop(kind))))
            filled[kind], caps[kind] = 0, cap_bytes
    closed += [(last_seen[kind], tuple(rest)) for kind, rest in open_buckets.items()]
    return tuple(indices for _, indices in sorted(closed))
