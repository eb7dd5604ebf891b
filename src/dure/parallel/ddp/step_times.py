"""What a step spent where: measured on the host's clock, at events the reducer sees anyway.

    forward            backward: compute                 wait
    |------------------|-----------------------------|---------|
                              |-- bucket 0 --|
                                   |---- bucket 1 -------------|
                              |<------ communication --------->|
                                                     |<exposed>|

Communication that runs while backward still computes costs nothing but memory bandwidth; what
counts is the *exposed* part: the time in which the step does nothing but wait for it.

If there are listeners, the step's phases and the buckets that were reduced beside them are emitted
as spans (`trace_step`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.trace import spans
from dure.training.module_times import ModuleTimes, emit_phases

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.parallel.ddp.buckets import Bucket

__all__ = ["Clock", "StepTimes", "trace_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one forward and backward with reduction.

    Attributes:
        forward_s: From the call of forward to the first gradient of backward.
        backward_s: From the first gradient of backward to the last.
        comm_s: From the start of the first bucket's reduction to the end of the last one's.
        exposed_comm_s: The part of the step in which it only started or waited for reductions.
        step: Number of the step, from 1; 0 before the first.
        num_bytes: Reduced bytes of this rank's buckets.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    comm_s: float = 0.0
    exposed_comm_s: float = 0.0
    step: int = 0
    num_bytes: int = 0

    @property
    def exposed_forward_s(self) -> float:
        """What of it was before backward: nothing."""
        return 0.0

    @property
    def modules(self) -> Mapping[str, ModuleTimes]:
        """Nothing is communicated module by module."""
        return {}

    @property
    def overlap_s(self) -> float:
        """Seconds of communication during which backward continued to compute."""
        return max(0.0, min(self.comm_s - self.exposed_comm_s, self.backward_s))


class Clock:
    """Stamps of the current step, in nanoseconds of `time.monotonic_ns`.

    Attributes:
        launches: When each bucket's reduction began to be started, and when it had been.
    """

    __slots__ = (
        "backward_end",
        "backward_start",
        "comm_end",
        "comm_start",
        "forward",
        "launch_ns",
        "launches",
        "num_bytes",
        "step",
    )

    def __init__(self) -> None:
        self.forward = self.backward_start = self.backward_end = 0
        self.comm_start = self.comm_end = self.launch_ns = 0
        self.step = self.num_bytes = 0
        self.launches: list[tuple[int, int]] = []

    @staticmethod
    def now() -> int:
        """Return the present moment."""
        return time.monotonic_ns()

    def start_backward(self) -> None:
        """Note that the first gradient is ready; stamps of an earlier step are dropped."""
        self.backward_start = self.now()
        self.backward_end = self.comm_start = self.comm_end = self.launch_ns = 0
        self.step += 1
        self.num_bytes = 0
        self.launches.clear()

    def launched(self, start: int, num_bytes: int) -> None:
        """Note that the next bucket's reduction was started, from `start` until now."""
        now = self.now()
        self.comm_start = self.comm_start or start
        self.launch_ns += now - start
        self.num_bytes += num_bytes
        self.launches.append((start, now))

    def times(self) -> StepTimes:
        """Return what the finished step took."""
        exposed = self.launch_ns + self.comm_end - self.backward_end
        return StepTimes(
            forward_s=max(0, self.backward_start - self.forward) / 1e9 if self.forward else 0.0,
            backward_s=(self.backward_end - self.backward_start) / 1e9,
            comm_s=(self.comm_end - self.comm_start) / 1e9,
            exposed_comm_s=exposed / 1e9,
            step=self.step,
            num_bytes=self.num_bytes,
        )


def trace_step(clock: Clock, group: ProcessGroup, buckets: Sequence[Bucket]) -> None:
    """Emit the spans of the step that has just ended; called only if there are listeners.

    A bucket's span ends when the rank waited for all of them; a timeline takes the true end from
    the operation that the bucket started.
    """
    step: dict[str, str | int | float] = {"step": clock.step}
    waiting = _waiting_since(clock)
    emit_phases(group, step, clock.forward, clock.backward_start, waiting, clock.comm_end)
    for bucket, (start, started) in zip(buckets, clock.launches, strict=False):
        about = {
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
                details=step | about,
            )
        )


def _waiting_since(clock: Clock) -> int:
    """Return when backward had nothing left to compute.

    The last bucket may be reduced before its start returns; backward then ends soon after that, and
    computes nothing in between.
    """
    if not clock.launches:
        return clock.backward_end
    start, started = clock.launches[-1]
    computed = clock.backward_end - started
    return min(start, clock.backward_end) if started - start > computed else clock.backward_end
