"""What a timeline shows of a step: its phases, and the buckets that travelled beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dure.trace import spans

if TYPE_CHECKING:
    from dure.parallel.ddp.reducer import Reducer
    from dure.parallel.ddp.timing import Clock

__all__ = ["tell_step"]


def tell_step(reducer: Reducer) -> None:
    """Emit the spans of the step that has just ended; called only where somebody listens.

    A bucket's span ends when the rank waited for all of them; a timeline takes the true end from
    the operation that the bucket started.
    """
    clock, group = reducer.clock, reducer.group
    step: dict[str, str | int | float] = {"step": clock.step}
    common = {"global_rank": group.global_ranks[group.rank()], "group": group.group_name}

    def emit(name: str, start: int, end: int, **more: Any) -> None:
        spans.emit(spans.Span(name=name, start_ns=start, end_ns=end, **common, **more))

    if clock.forward:
        emit("forward", clock.forward, clock.backward_start, details=step)
    waiting = _waiting_since(clock)
    emit("backward", clock.backward_start, waiting, details=step)
    emit("wait for gradients", waiting, clock.comm_end, details=step)
    for bucket, (start, started) in zip(reducer.buckets, clock.launches, strict=False):
        about = {
            "bytes": bucket.num_bytes,
            "gradients": len(bucket.slots),
            "first": bucket.slots[0].name if bucket.slots else "",
            "last": bucket.slots[-1].name if bucket.slots else "",
        }
        emit(
            f"bucket {bucket.index}",
            start,
            clock.comm_end,
            started_ns=started,
            track=spans.BUCKETS,
            details=step | about,
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
