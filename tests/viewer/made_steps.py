"""Steps of a run that never was: spans and marks."""

from typing import Any

MS = 10**6


def phases(rank: int, steps: int, part_ms: tuple[int, int] = (6, 4)) -> list[dict[str, Any]]:
    """Return the spans of steps of 20 ms: forward, backward, and a rest that nobody tells of."""
    found: list[dict[str, Any]] = []
    for i in range(steps):
        at = i * 20 * MS
        for name, ms in zip(("forward", "backward"), part_ms, strict=True):
            found.append(
                {"name": name, "track": "step", "global_rank": rank}
                | {"start_ns": at, "end_ns": at + ms * MS}
            )
            at += ms * MS
    return found


def marks(*points: tuple[int, int, Any]) -> list[dict[str, Any]]:
    return [{"step": s, "time_ns": ms * MS, "scalars": values} for s, ms, values in points]
