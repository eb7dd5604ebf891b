"""Mixed precision over several ranks: scaling gradients, and clipping those that are sharded.

`scaler` holds `GradScaler`, whose ranks skip the same steps and keep the same scale; `clipping`
holds `clip_grad_norm_` for ranks that own different gradients.
"""

from __future__ import annotations

from dure.parallel.amp.clipping import clip_grad_norm_
from dure.parallel.amp.scaler import GradScaler

__all__ = ["GradScaler", "clip_grad_norm_"]
