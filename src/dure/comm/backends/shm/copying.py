"""How the engine copies memory between ranks: the setting, and what was chosen.

Staging moves every byte twice, a copy by the kernel (process_vm_readv) once. Which is faster
depends on the distance between the cores, so the first group of a host measures it
(csrc/core/calibration.h), unless DURE_SINGLE_COPY sets it. If the machine is too busy for that, the
thresholds are 128 KiB.
"""

from __future__ import annotations

from typing import NamedTuple

from dure import env
from dure.errors import UsageError

__all__ = ["CopyPlan", "single_copies_wanted"]

_MEASURE, _NEVER = -1, -2


class CopyPlan(NamedTuple):
    """How the ranks of a group copy (the engine's `Group.copies`); equal on all of them.

    `line_us` is the time of a cache line from core to core, 0 if nothing was measured. The
    thresholds are in bytes, None for never. With `learns` that of messages does not count: their
    ranks find the quicker way with the first messages of each length.
    """

    permitted: bool
    measured: bool
    learns: bool
    line_us: float
    message_bytes: int | None
    shared_bytes: int | None
    block_bytes: int | None

    def __str__(self) -> str:
        line = f"a cache line takes {self.line_us:.2f} us" if self.measured else "not measured"
        if not self.permitted:
            return f"{line}; single copies are not permitted, or off: all copies are staged"
        messages = "that are quicker so" if self.learns else _from(self.message_bytes)
        return (
            f"{line}; copied once: messages {messages}, one block for all ranks "
            f"{_from(self.shared_bytes)}, a block for each {_from(self.block_bytes)}"
        )


def _from(threshold: int | None) -> str:
    if threshold is None:
        return "never"
    return f"from {threshold / 1024:.0f} KiB" if threshold >= 1024 else f"from {threshold} B"


def single_copies_wanted() -> int:
    """Read DURE_SINGLE_COPY, as the engine takes it.

    Raises:
        UsageError: It is neither a number of bytes nor auto or off.
    """
    value = (env.text("DURE_SINGLE_COPY") or "auto").lower()
    if value in {"auto", "off"}:
        return _MEASURE if value == "auto" else _NEVER
    if value.isascii() and value.isdigit():
        return min(int(value), 2**62)
    raise UsageError(
        "DURE_SINGLE_COPY is neither a number of bytes nor auto or off",
        seen=repr(value),
        fix="Leave it unset, or set it to auto, off, or a number such as 65536.",
    )
