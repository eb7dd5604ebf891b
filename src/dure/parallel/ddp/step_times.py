"""What a step of DDP spent where: stamps at events that the reducer sees anyway.

    forward            backward: compute                 wait
    |------------------|-----------------------------|---------|
                              |-- bucket 0 --|
                                   |---- bucket 1 -------------|
                              |<------ communication --------->|
                                                     |<exposed>|

Only exposed communication makes a step longer (training/module_times.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dure.trace import spans
from dure.training.module_times import StepClock, now

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.buckets import Bucket

__all__ = ["BucketClock", "trace_step"]


class BucketClock(StepClock):
    """Stamps of a step whose gradients are reduced in buckets.

    Attributes:
        launches: When each bucket's reduction began to be started, and when it had been.
    """

    def reset(self) -> None:
        """Drop the stamps of the step."""
        super().reset()
        self.launches: list[tuple[int, int]] = []

    def begin_forward(self) -> None:
        """Note that a forward begins whose backward will reduce."""
        self.forward = now()

    def begin_backward(self) -> None:
        """Note that the first gradient is ready; stamps of an earlier backward are dropped."""
        forward = self.forward
        self.reset()
        self.forward = forward
        super().begin_backward()

    def launched(self, start: int, num_bytes: int) -> None:
        """Note that the next bucket's reduction was started, from `start` until now."""
        self.comm_start = self.comm_start or start
        self.launches.append((start, start + self.expose(start)))
        self.num_bytes += num_bytes

    def reduced(self, exposed: int) -> None:
        """Note that all buckets are reduced.

        Args:
            exposed: What `exposed` was at the end of backward. All later time is exposed, starts of
                buckets too.
        """
        self.comm_end = now()
        self.exposed = exposed + self.comm_end - self.backward_end


def trace_step(clock: BucketClock, group: ProcessGroup, buckets: Sequence[Bucket]) -> None:
    """Emit the spans of the step that has just ended; called only if there are listeners.

    A bucket's span ends when the rank waited for all of them; a timeline takes the true end from
    the operation that the bucket started.
    """
    clock.emit_phases(group, _waiting_since(clock), clock.comm_end)
    for bucket, (start, started) in zip(buckets, clock.launches, strict=False):
        details: dict[str, str | int | float] = {
            "step": clock.step,
            "bytes": bucket.num_bytes,
            "gradients": len(bucket.views),
            "first": bucket.views[0].name if bucket.views else "",
            "last": bucket.views[-1].name if bucket.views else "",
        }
        spans.emit(
            spans.Span(
                name=f"bucket {bucket.index}",
                global_rank=group.global_ranks[group.rank()],
                group=group.group_name,
                track=spans.BUCKETS,
                start_ns=start,
                started_ns=started,
                end_ns=clock.comm_end,
                details=details,
            )
        )


def _waiting_since(clock: BucketClock) -> int:
    """Return when backward had nothing left to compute.

    The last bucket may be reduced before its start returns; backward then ends soon after that, and
    computes nothing in between.
    """
    if not clock.launches:
        return clock.backward_end
    start, started = clock.launches[-1]
    computed = clock.backward_end - started
    return min(start, clock.backward_end) if started - start > computed else clock.backward_end
