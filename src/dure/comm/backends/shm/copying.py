"""How the engine copies memory between ranks: the setting, and what was chosen.

Staging moves every byte twice, a copy by the kernel (process_vm_readv) once. Which is faster the
ranks learn from the operations themselves (csrc/core/block_ways.h, message_ways.h), unless
DURE_SINGLE_COPY sets it.
"""

from __future__ import annotations

from typing import NamedTuple

from dure import env
from dure.errors import UsageError

__all__ = ["CopyPlan", "single_copies_wanted"]

_LEARN, _NEVER = -1, -2


class CopyPlan(NamedTuple):
    """How the ranks of a group copy (the engine's `Group.copies`); equal on all of them.

    With `learns` the ranks find out which way is quicker, for each kind and length of operations.
    Otherwise all is copied once from `once_bytes` bytes on; None for never.
    """

    permitted: bool
    learns: bool
    once_bytes: int | None

    def __str__(self) -> str:
        if self.permitted and self.learns:
            return "single copies where they are quicker"
        if self.permitted and self.once_bytes is not None:
            return f"single copies from {self.once_bytes} B on"
        return "no single copies (not permitted, or off)"


def single_copies_wanted() -> int:
    """Read DURE_SINGLE_COPY, as the engine takes it.

    Raises:
        UsageError: It is neither a number of bytes nor auto or off.
    """
    value = (env.text("DURE_SINGLE_COPY") or "auto").lower()
    if value in {"auto", "off"}:
        return _LEARN if value == "auto" else _NEVER
    if value.isascii() and value.isdigit():
        return min(int(value), 2**62)
    raise UsageError(
        "DURE_SINGLE_COPY is neither a number of bytes nor auto or off",
        seen=repr(value),
        fix="Leave it unset, or set it to auto, off, or a number such as 65536.",
    )
