"""Plans: what a training job needs, by arithmetic, before it starts; without torch.

`memory` says what each rank of a mesh holds.
"""

from __future__ import annotations

from dure.plan.memory import Memory, Mesh, Model, Training, memory

__all__ = ["Memory", "Mesh", "Model", "Training", "memory"]
