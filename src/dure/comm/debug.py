"""Torch's debug levels, which programs ask for. Our checks are always on, whatever the level."""

from __future__ import annotations

from enum import Enum

from dure import env

__all__ = ["DebugLevel", "get_debug_level", "set_debug_level", "set_debug_level_from_env"]


class DebugLevel(Enum):
    """How much torch.distributed would check."""

    OFF = 0
    """Nothing more than usual."""
    INFO = 1
    """Say more in DDP's messages."""
    DETAIL = 2
    """Compare the ranks' calls; Dure always does."""


_level = DebugLevel.OFF


def get_debug_level() -> DebugLevel:
    """Return the level that was set."""
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the level."""
    global _level
    _level = level


def set_debug_level_from_env() -> None:
    """Set the level from TORCH_DISTRIBUTED_DEBUG (OFF, INFO or DETAIL)."""
    name = (env.text("TORCH_DISTRIBUTED_DEBUG") or "OFF").upper()
    set_debug_level(DebugLevel[name] if name in DebugLevel.__members__ else DebugLevel.OFF)
