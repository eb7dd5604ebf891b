"""Mixed precision over several ranks: `GradScaler`, whose ranks skip the same steps."""

from __future__ import annotations

from dure.parallel.amp.scaler import GradScaler

__all__ = ["GradScaler"]
