"""Buckets: which gradients travel together, in what order, and where they lie.

Backward produces gradients roughly in the reverse order of registration, one after the other. A
reduction for each of them would pay the fixed cost of a collective hundreds of times; one
reduction for all could only start when backward has ended. A *bucket* is the middle way: a run of
gradients, in that reverse order, that is reduced by one collective as soon as the last of them is
ready, while backward continues with the layers below.

*The plan* (`plan_buckets`) is pure arithmetic. Three rules make it:

* Gradients of one bucket have one *kind* (dtype and device), since they share one flat tensor. A
  sparse gradient fills a bucket of its own.
* A bucket is closed once it holds at least its *cap* in bytes. The first one of each kind usually
  has a small cap, so that communication starts early, when the last layers are done.
* Buckets are numbered by the gradient that completes them. All ranks reduce them in this order,
  whatever order they become ready in, so that the ranks' collectives always match.

*The memory* is one block a kind (`FlatBuffers`), shared with the other ranks; a bucket is a stretch
of it. Buckets can therefore be cut again without a byte of further memory, and without asking the
other ranks for it:

    block    |  bucket 0  |   bucket 1   |     bucket 2    ...     | unused |
    bucket   | gradient | gradient | ... | gradient |
    the last | gradient | ... | gradient | used parameters |

Gradients within a bucket lie without padding. The last one also carries the used-parameter bitmap
(outcome.py).

*The assignment* (`BucketAssignment`) begins with the order that is expected, the reverse of
registration, and is replaced once, when the order in which gradients become ready is known; see
"Rebuilding" in reducer.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from dure.comm.memory import heap_address
from dure.parallel.ddp.outcome import UsedParameters
from dure.trace import logs
from dure.training.flat_buffers import FlatBuffers, padded
from dure.training.grad_views import (
    CastGradView,
    CastPartGradView,
    GradView,
    NamedParameter,
    PartGradView,
    SparseGradView,
    own_part,
)
from dure.training.memory import own_zeros

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.comm.work import Work

__all__ = [
    "FIRST_CAP_BYTES",
    "Bucket",
    "BucketAssignment",
    "GradBucket",
    "GradientSize",
    "ReducerOptions",
    "plan_buckets",
]

FIRST_CAP_BYTES = 1 << 20
"""Cap of the first bucket of each kind (the value of torch's DDP)."""

_ROOT = 0
_SHOWN = 8
"""Buckets whose sizes the log has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSize:
    """What the plan needs to know of one gradient."""

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
        For each bucket the indices of its gradients, in the order of their offsets in it. The
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


class Bucket:
    """Gradients that are reduced together; see the module's text for the layout.

    Attributes:
        index: Its place in the order of reduction.
        flat: All of it: gradients, and the used-parameter bitmap in the last one.
        num_bytes: Size of `flat`.
        buffer: The gradients.
        views: The places of the gradients.
        absent: Those that no backward of this rank fills (static graph).
        idle: Those that the present backward does not fill.
        pending: How many gradients the present backward still owes.
        work: The reduction, once started.
        result: Returned by a communication hook.
    """

    __slots__ = (
        "absent",
        "buffer",
        "flat",
        "idle",
        "index",
        "num_bytes",
        "pending",
        "result",
        "views",
        "work",
    )

    def __init__(
        self, index: int, flat: torch.Tensor, buffer: torch.Tensor, views: Sequence[GradView]
    ) -> None:
        self.index, self.flat, self.buffer, self.views = index, flat, buffer, list(views)
        self.num_bytes = flat.numel() * flat.element_size()
        self.absent: list[GradView] = []
        self.idle: list[GradView] = []
        self.pending = len(self.views)
        self.work: Work | None = None
        self.result: torch.futures.Future[object] | None = None
        self.expect()

    @property
    def sparse(self) -> SparseGradView | None:
        """The one gradient of a bucket of sparse entries."""
        first = self.views[0] if self.views else None
        return first if isinstance(first, SparseGradView) else None

    def expect(self) -> None:
        """Take over how often each gradient is expected."""
        self.absent = [view for view in self.views if not view.expected]
        self.reset()

    def reset(self) -> None:
        """Get ready for the next backward."""
        self.idle = list(self.absent)
        self.pending = len(self.views) - len(self.idle)
        if self.work is not None:
            self.work.disown()  # not waited for where the one of an earlier bucket has failed
        self.work, self.result = None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerOptions:
    """How a reducer buckets, and what it expects.

    Attributes:
        caps: A bucket is closed when it holds at least this many bytes: the first, the second, ...;
            the last number holds for all further ones.
        allow_unused: A parameter without a gradient is no error.
        static_graph: Every backward is like the first one.
        leave_out_unused: Parameters that no rank used in the first backward are never used.
        reduce_dtype: In which real gradients are reduced; their own by default.
    """

    caps: tuple[int, ...]
    allow_unused: bool = False
    static_graph: bool = False
    leave_out_unused: bool = False
    reduce_dtype: torch.dtype | None = None


class BucketAssignment:
    """Which bucket each gradient of a module is in for now, and the memory of all buckets.

    Collective:
        Construction, where buckets are memory that ranks share.

    Attributes:
        views: Of all parameters' gradients, in the order of registration.
        buckets: In the order in which they are reduced. The last one is dense and carries the
            used-parameter bitmap; it may have no gradients at all.
        used_parameters: The end of the last one.
    """

    def __init__(
        self, group: ProcessGroup, parameters: Sequence[NamedParameter], options: ReducerOptions
    ) -> None:
        self._options, self._num_ranks = options, group.size()
        self.views = [self._make_view(number, p) for number, p in enumerate(parameters)]
        self._extra = UsedParameters.size(len(parameters))
        dense = [view for view in self.views if not _is_sparse(view)]
        device = self.views[0].parameter.device
        self._kind_of_bitmap = dense[0].kind if dense else (torch.float32, device)
        numels = {view.kind: 0 for view in dense} | {self._kind_of_bitmap: 0}
        for kind in numels:
            numels[kind] = self._extra + padded(1, kind[0])
        for view in dense:
            numels[view.kind] += view.numel + padded(1, view.dtype)
        self._memory = FlatBuffers(numels, partial(own_zeros, group))
        self._new_plan: list[list[GradView]] | None = None
        self._cut(self._plan(range(len(parameters) - 1, -1, -1)))

    def bucket_sizes(self) -> list[int]:
        """Return the bytes of gradients in each bucket."""
        return [sum(view.size for view in b.views) for b in self.buckets if b.views]

    def describe(self) -> str:
        """Return the buckets as text for the log."""
        sizes = self.bucket_sizes()
        shown = [logs.size_text(size) for size in sizes[:_SHOWN]]
        shown += [f"{len(sizes) - _SHOWN} more"] if len(sizes) > _SHOWN else []
        reached = heap_address(self.buckets[-1].flat) is not None
        where = ", in memory that the ranks of a host share" if reached else ""
        count = sum(len(bucket.views) for bucket in self.buckets)
        return (
            f"{count} gradients of {logs.size_text(sum(sizes))} in {len(sizes)} bucket"
            f"{'s' if len(sizes) > 1 else ''} ({', '.join(shown)}){where}"
        )

    def _make_view(self, number: int, named: NamedParameter) -> GradView:
        own, wanted = named.parameter.dtype, self._options.reduce_dtype
        if wanted == own or not own.is_floating_point:
            wanted = None
        if named.sparse:
            return SparseGradView(number, named, wanted)
        is_part = own_part(named.parameter) is not named.parameter
        if wanted is None:
            return (PartGradView if is_part else GradView)(number, named, own)
        return (CastPartGradView if is_part else CastGradView)(number, named, wanted)

    def _plan(self, order: Sequence[int]) -> list[list[GradView]]:
        """Divide gradients into buckets; `order` has the numbers of those that take part."""
        taking_part = [self.views[number] for number in order]
        plan = plan_buckets(
            [_size_of(view) for view in taking_part],
            caps=self._options.caps,
            order=range(len(taking_part)),
        )
        return [[taking_part[i] for i in members] for members in plan]

    def _cut(self, plan: Sequence[Sequence[GradView]]) -> None:
        """Cut the memory into the buckets of `plan`; gradients move to their new places."""
        for view in self.views:  # also those that the plan leaves out
            view.leave()
        plan = list(plan)
        if not plan or _is_sparse(plan[-1][0]):
            plan.append(())
        self._memory.restart()
        self.buckets: list[Bucket] = []
        for index, views in enumerate(plan):
            extra = self._extra if index == len(plan) - 1 else 0
            self.buckets.append(self._cut_one(index, views, extra))
        self.used_parameters = UsedParameters(
            self.buckets[-1].flat, len(self.views), self._num_ranks
        )

    def _cut_one(self, index: int, views: Sequence[GradView], extra: int) -> Bucket:
        if views and _is_sparse(views[0]):
            nothing = torch.empty(0, device="cpu")
            views[0].place(nothing, index, 0)
            return Bucket(index, nothing, nothing, views)
        numel = sum(view.numel for view in views)
        flat = self._memory.take(views[0].kind if views else self._kind_of_bitmap, numel + extra)
        offset = int(flat.storage_offset())
        for view in views:
            view.place(flat, index, offset)
            offset += view.numel
        return Bucket(index, flat, flat[:numel] if extra else flat, views)

    def learn(
        self, group: ProcessGroup, ready_order: Sequence[int], used: Sequence[bool] | None
    ) -> None:
        """Plan buckets by rank 0's order.

        Collective:
            All ranks of the group.

        Cost:
            One broadcast of 8 bytes a parameter; nothing where there is one bucket.

        Args:
            group: The ranks.
            ready_order: Numbers of parameters as their gradients came on this rank.
            used: Whether any rank uses each parameter; the others are left out. None: all stay.
        """
        seen = dict.fromkeys(ready_order)
        present = [view.number for bucket in self.buckets for view in bucket.views]
        numbers = [*seen, *(number for number in present if number not in seen)]
        if len(self.buckets) > 1:
            order = torch.tensor(numbers, device=self.used_parameters.flags.device)
            group.broadcast(order, _ROOT)
            numbers = order.tolist()
        else:  # one order of buckets, independent of their contents
            numbers = present
        if used is not None:
            numbers = [number for number in numbers if used[number]]
        self._new_plan = self._plan(numbers)

    def rebuild(self) -> bool:
        """Follow the plan that was learned, if there is one; return whether there was."""
        if self._new_plan is None:
            return False
        if self._new_plan != [bucket.views for bucket in self.buckets if bucket.views]:
            self._cut(self._new_plan)
        self._new_plan = None
        return True


def _is_sparse(view: GradView) -> bool:
    return isinstance(view, SparseGradView)


def _size_of(view: GradView) -> GradientSize:
    if _is_sparse(view):
        return GradientSize(num_bytes=1 << 62, kind=("sparse", view.number))
    return GradientSize(num_bytes=view.size, kind=(*view.kind, view.parameter.dtype))


class GradBucket:
    """What a communication hook sees of a bucket (torch's interface, and `group` and `names`).

    Attributes:
        group: The ranks that the gradients are averaged over.

    Obtained from:
        A communication hook of `DistributedDataParallel` is called with it.

    Example:
        ```python
        def summed(state, bucket):  # sums instead of means
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        model = dist.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        model.register_comm_hook(None, summed)
        model(torch.ones(1, 2)).sum().backward()
        assert model.module.weight.grad.tolist() == [[2.0, 2.0]]
        ```
    """

    __slots__ = ("_bucket", "_buffer", "_last", "group")

    def __init__(self, bucket: Bucket, last: bool, group: ProcessGroup) -> None:
        self._bucket, self._last, self.group = bucket, last, group
        sparse = bucket.sparse
        self._buffer = bucket.buffer if sparse is None else sparse.take()

    def index(self) -> int:
        """Return the bucket's number; they are handed to the hook in this order."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """Return this rank's gradients as one flat tensor [n]; not yet divided by anything.

        That of a sparse gradient is the sparse tensor itself.
        """
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return the bucket's gradients, in the shapes of their parameters.

        They share the memory of `buffer`, also after `set_buffer`.
        """
        places = [view.tensor for view in self._bucket.views]
        if self._bucket.sparse is not None:
            return [self._buffer]
        if self._buffer is self._bucket.buffer:
            return places
        parts = self._buffer.split([place.numel() for place in places])
        return [
            part.as_strided(place.shape, place.stride(), part.storage_offset())
            for part, place in zip(parts, places, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that the gradients belong to."""
        return [view.parameter for view in self._bucket.views]

    def names(self) -> list[str]:
        """Return the parameters' paths in the module, which stay when buckets are cut again."""
        return [view.name for view in self._bucket.views]

    def is_last(self) -> bool:
        """Tell whether this is the last bucket of the backward."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the flat tensor that `buffer` returns, e.g. by a compressed one."""
        self._buffer = tensor
