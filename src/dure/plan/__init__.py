"""Plans: resources of a training job, by arithmetic, before it starts; without torch.

`plan` says which layout suits a job on a machine, with figures and reasons; `memory` what each rank
of a mesh holds.
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
