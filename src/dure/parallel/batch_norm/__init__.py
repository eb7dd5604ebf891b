"""Batch normalisation over the batches of all ranks.

`module` holds the layer, with torch's interface; `statistics` the arithmetic and its collectives.
"""

from __future__ import annotations

from dure.parallel.batch_norm.module import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
