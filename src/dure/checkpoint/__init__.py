"""Checkpoints of a data-parallel run: whole or not there, never half; resumed bit for bit.

`Checkpointer` saves and loads. Below it: `folder` (names and the atomic commit), `manifest` and
`parts` (files and checksums), `tree` (state without pickle), `objects` (modules, optimizers and the
rest), `randomness` (the generators), `agreement` (all ranks or none).
"""

from __future__ import annotations

from dure.checkpoint.checkpointer import Checkpointer, Saved
from dure.checkpoint.objects import PerRank

__all__ = ["Checkpointer", "PerRank", "Saved"]
