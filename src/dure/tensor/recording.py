"""Who wants to hear of the collectives that DTensors call: `CommDebugMode`, `explain`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["recorders"]

recorders: list[Callable[..., Any]] = []
"""Called with (move, local tensor, group, step) before each collective of a redistribution."""
