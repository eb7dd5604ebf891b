"""Predicted time and memory of a training job, computed before it starts; without torch.

`plan` compares the layouts of a job on a machine; `memory` computes the memory of each rank of a
mesh.
"""

from __future__ import annotations

from dure.plan.jobs import Job, configured_model, find_model
from dure.plan.layouts import Layout
from dure.plan.machines import Gpu, Machine, find_gpu
from dure.plan.memory import Memory, Mesh, Model, Training, memory
from dure.plan.planning import Change, Plan, Row, plan

__all__ = [
    "Change",
    "Gpu",
    "Job",
    "Layout",
    "Machine",
    "Memory",
    "Mesh",
    "Model",
    "Plan",
    "Row",
    "Training",
    "configured_model",
    "find_gpu",
    "find_model",
    "memory",
    "plan",
]
