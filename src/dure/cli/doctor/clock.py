"""The clock: whether it is kept right, and how fast it can be read."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path

from dure.cli.doctor.finding import Finding, fine, note, warning

__all__ = ["Clock", "judge", "judge_difference", "read"]

_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_TIME_ERROR = 5
_TIMEX_BYTES = 512  # struct timex has 208; `modes` is its first word, and 0 changes nothing
_CALLS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """`synchronised` is None where the kernel does not tell; `read_ns` is the cost of a reading."""

    synchronised: bool | None
    source: str
    read_ns: float


def read() -> Clock:
    """Ask the kernel, changing nothing."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    try:
        source = _SOURCE.read_text().strip()
    except OSError:
        source = "unknown"
    start = time.perf_counter_ns()
    for _ in range(_CALLS):
        time.monotonic_ns()
    spent = time.perf_counter_ns() - start
    return Clock(
        synchronised=None if state < 0 else state != _TIME_ERROR,
        source=source,
        read_ns=spent / _CALLS,
    )


def judge(clock: Clock) -> list[Finding]:
    """Say whether times of this host can be compared with others'."""
    text = f"source {clock.source}, {clock.read_ns:.0f} ns a reading"
    found = [fine("clock", text)]
    if clock.read_ns > 500:
        found = [
            warning(
                "clock",
                f"{text}: measuring and tracing become slow",
                "Use the clock source tsc or kvm-clock, if the host lets you.",
            )
        ]
    if clock.synchronised is False:
        found.append(
            note(
                "clock",
                "the time of day is not synchronised: traces and logs of several hosts do not line "
                "up (it does not matter on one)",
                "Start chrony or systemd-timesyncd (in a virtual machine its host may do it).",
            )
        )
    return found


def judge_difference(seconds: float, uncertain_s: float) -> Finding:
    """Judge how far another host's clock is from this one's."""
    text = f"{seconds * 1e3:+.0f} ms from this host's (+-{uncertain_s * 1e3:.0f} ms)"
    if abs(seconds) - uncertain_s > 1.0:
        return warning("clock difference", text, "Synchronise the clocks of all hosts (chrony).")
    return fine("clock difference", text)
