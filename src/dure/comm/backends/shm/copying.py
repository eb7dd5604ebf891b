"""How the engine copies memory between ranks, as a user sets and sees it.

Staging moves every byte twice, one copy by the kernel (process_vm_readv) once. Which is quicker
depends on how far apart the cores are, so the first group of a host measures it
(csrc/core/calibration.h); DURE_SINGLE_COPY says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from dure import env
from dure.errors import UsageError
from dure.native import Group

__all__ = ["CopyPlan", "copy_plan", "single_copies_wanted"]

_MEASURE, _NEVER = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """How the ranks of a group copy; equal on all of them.

    `line_us` is a cache line's way from core to core, 0 where nothing was measured. The thresholds
    are in bytes, None for never. Each pair of times is in us, for 32 KiB and 512 KiB.
    """

    permitted: bool
    measured: bool
    line_us: float
    message_bytes: int | None
    shared_bytes: int | None
    block_bytes: int | None
    staged_message_us: tuple[float, float]
    single_message_us: tuple[float, float]
    staged_exchange_us: tuple[float, float]
    single_exchange_us: tuple[float, float]

    def __str__(self) -> str:
        line = f"a cache line takes {self.line_us:.2f} us" if self.measured else "not measured"
        if not self.permitted:
            return f"{line}; single copies are not permitted, or off: all copies are staged"
        return (
            f"{line}; copied once: messages {_from(self.message_bytes)}, one block for all ranks "
            f"{_from(self.shared_bytes)}, a block for each {_from(self.block_bytes)}"
        )


def _from(threshold: int | None) -> str:
    if threshold is None:
        return "never"
    return f"from {threshold / 1024:.0f} KiB" if threshold >= 1024 else f"from {threshold} B"


def copy_plan(group: Group) -> CopyPlan:
    """Read how `group` copies; call it after `ready`."""
    permitted, measured, line_us, message, shared, block, *times = group.copies
    return CopyPlan(
        permitted=permitted,
        measured=measured,
        line_us=line_us,
        message_bytes=None if message < 0 else message,
        shared_bytes=None if shared < 0 else shared,
        block_bytes=None if block < 0 else block,
        staged_message_us=times[0],
        single_message_us=times[1],
        staged_exchange_us=times[2],
        single_exchange_us=times[3],
    )


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
