"""Marks: values that a program reports for its steps (`dure.log`).

They are recorded only while there is a reader: the page of the run (`publishing`) or
`record_steps`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Mark"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The values that a rank reported for one step.

    Attributes:
        step: The number of the step, as the program counts.
        time_ns: Time of the report, on `time.monotonic_ns`.
        scalars: Values by name; None for a value that is not finite, which JSON cannot represent.
    """

    step: int
    time_ns: int
    scalars: dict[str, float | None] = field(default_factory=dict[str, float | None])
