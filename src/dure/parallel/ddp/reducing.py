"""How a bucket is reduced: started when it is filled, waited for at the end of backward.

A bucket is averaged by one asynchronous all_reduce of its flat tensor. Three things change that:

* *Sparse entries* cannot be averaged by the collective: they are summed and divided here.
* *A communication hook* (hooking.py) replaces the collective. It divides by the number of ranks.
* *A divisor*: in a `Join` ranks may have run out of inputs, and sums are divided by the number of
  those that have some. Then the collective sums, and the division is made here; a hook's result,
  already divided by all ranks, is scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.comm.ops import ReduceOp
from dure.errors import ModuleError

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.errors import CommError, HookError
    from dure.parallel.ddp.buckets import Bucket
    from dure.parallel.ddp.hooking import HookRunner
    from dure.parallel.ddp.ledger import Ledger

__all__ = ["Reductions"]


class Reductions:
    """Reduces the buckets of one reducer.

    Threads: as the reducer's; its lock is held.

    Attributes:
        hook: The communication hook.
        divisor: What sums of gradients are divided by; None is the number of ranks.
        awaited_too: What else the end of the next backward waits for (Any: nobody looks at it).
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.hook: HookRunner | None = None
        self.divisor: int | None = None
        self.awaited_too: list[torch.futures.Future[Any]] = []

    @property
    def averages(self) -> bool:
        """Whether the collectives average over all ranks, and do not sum."""
        return self.divisor is None

    def verify_possible(self) -> None:
        """Raise `ModuleError` if the group has ended."""
        if self._group.closed:
            raise ModuleError(
                "the process group of this DistributedDataParallel has been destroyed",
                group=self._group.group_name,
                seen="destroy_process_group() and shrink() end groups",
                fix="Wrap the module again, on the new group: DistributedDataParallel(ddp.module).",
            )

    def start(self, bucket: Bucket, buckets: Sequence[Bucket]) -> None:
        """Start the reduction of `bucket`, the next one of `buckets`, which is filled."""
        sparse = bucket.sparse
        if self.hook is not None:
            if bucket.slots:
                self.hook.start(bucket, bucket is _last_filled(buckets))
        elif sparse is not None:
            bucket.work = self._group.all_reduce(sparse.take(), ReduceOp.SUM, async_op=True)
        else:
            # The last one has nothing to run beside; alone, it needs no thread to be woken for it.
            alone = bucket is buckets[-1] and not any(map(_is_under_way, buckets))
            bucket.work = self._group.all_reduce(bucket.flat, self._op(), async_op=not alone)

    def wait(self, buckets: Sequence[Bucket], ledger: Ledger) -> None:
        """Wait for all buckets, and make averages of them."""
        if self.hook is not None:
            self.hook.finish(buckets, ledger, self._op())
        for bucket in buckets:
            if bucket.work is not None:
                bucket.work.wait()
            self._divide(bucket)
        while self.awaited_too:
            self.awaited_too.pop().wait()

    def take_hook_error(self) -> HookError | CommError | None:
        """Return the communication hook's error in this backward, and forget it."""
        return None if self.hook is None else self.hook.take_error()

    def _op(self) -> ReduceOp:
        return ReduceOp.AVG if self.averages else ReduceOp.SUM

    def _divide(self, bucket: Bucket) -> None:
        """Make averages of sums, where neither the collective nor a hook did."""
        n, sparse = self._group.size(), bucket.sparse
        hooked = self.hook is not None  # a hook divides by the number of ranks
        if sparse is not None:
            by = (self.divisor or n) / (n if hooked else 1)
            sparse.view = sparse.view if by == 1 else sparse.view / by
        elif self.divisor is not None:
            bucket.buffer.div_(self.divisor / n if hooked else self.divisor)


def _is_under_way(bucket: Bucket) -> bool:
    return bucket.work is not None and not bucket.work.is_completed()


def _last_filled(buckets: Sequence[Bucket]) -> Bucket:
    """Return the last bucket with gradients: the very last may have the ledger alone."""
    return buckets[-1] if buckets[-1].slots else buckets[-2]
