"""How much memory a rank takes at its peak, for whole columns of jobs; the formula is `memory`'s.

`memory` counts the microbatches that are live at once by walking through the schedule; here they
are counted in closed form (1F1B and interleaved), the stages are alike, and what the allocator and
libraries of a GPU take is added (constants `kept`, `fragments`, `context`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from dure.plan.constants import Constants
from dure.plan.cost import Column, Jobs
from dure.plan.memory import kept_elements

__all__ = ["ROOM", "Peak", "peak_memory"]

ROOM = 0.95
"""Of a GPU's memory: what a job may be predicted to take, to be called one that fits."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes of the fullest rank, by what they are for; together they are its peak.

    Attributes:
        parameters: Those that are computed with.
        gradients: Of them.
        optimizer: Two moments, and a float32 copy of the parameters where there is one.
        gathered: Of FSDP: parameters that are whole for a while.
        activations: Of all microbatches that are live at once.
        scores: Over the vocabulary, with their loss.
        overhead: Of the allocator, the driver, and libraries.
    """

    parameters: Column
    gradients: Column
    optimizer: Column
    gathered: Column
    activations: Column
    scores: Column
    overhead: Column

    @property
    def total(self) -> Column:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))


def peak_memory(jobs: Jobs, c: Constants) -> Peak:
    """Return what the fullest rank of each job holds at the peak of a step."""
    own, sharded = jobs.parameters, jobs.zero >= 2
    shard = np.where(sharded, jobs.shard, 1.0)
    kept_bytes = np.where(sharded & (jobs.master_bytes > 0), jobs.master_bytes, jobs.param_bytes)
    moments = np.where(sharded, 8.0, 8.0 + jobs.master_bytes)
    moments_over = np.where(jobs.zero == 1, jobs.replicas, shard)
    parts = {
        "parameters": own * kept_bytes / shard,
        "gradients": own * jobs.grad_bytes / shard,
        "optimizer": own * moments / moments_over,
        "gathered": np.where(jobs.shard > 1, _gathered(jobs), 0.0) * sharded,
    }
    first, last = _activations(jobs, c)
    scores = c.scores_kept * jobs.tokens * jobs.vocab / jobs.tp
    ends_fullest = last + scores > first
    parts["activations"] = np.where(ends_fullest, last, first)
    parts["scores"] = np.where(ends_fullest | (jobs.pp == 1), scores, 0.0)
    parts["overhead"] = (c.fragments - 1) * sum(parts.values()) + c.context
    return Peak(**parts)


def _gathered(jobs: Jobs) -> Column:
    """Return the bytes of whole parameters: two layers and the ends, or all where zero is 2."""
    ends = np.where(jobs.pp > 1, 1.0, 2.0 - jobs.tied) * jobs.vocab * jobs.width
    some = (2 * jobs.layer_parameters + ends) / jobs.tp
    held = np.where((jobs.zero == 2) | (jobs.pp > 1), jobs.parameters, some)
    return np.minimum(held, jobs.parameters) * jobs.param_bytes


def _activations(jobs: Jobs, c: Constants) -> tuple[Column, Column]:
    """Return the bytes of the first and of the last stage's activations at their peaks."""
    layers = np.ceil(jobs.layers / jobs.pp)
    kept = np.where(jobs.compiled > 0, 1.0, c.kept)
    units = kept * (2 + 2 * jobs.gated) * jobs.hidden
    elements = kept_elements(jobs.width, jobs.kv_width, jobs.heads, units) + 2 * jobs.width
    fused = jobs.fused > 0
    scores = np.where(fused, 0.0, 2.5 * jobs.heads * jobs.seq)
    # Recomputed operators: without fused attention its scores; else all but every second product.
    cheap = np.where(fused, 0.4 * elements, elements)
    whole = elements + scores
    each = np.where(jobs.selective > 0, cheap, whole) / jobs.tp
    inputs = jobs.width / np.where(jobs.sp > 0, jobs.tp, 1.0)
    again = jobs.recompute
    one_layer = np.where(again > 0, 2 * whole / jobs.tp, 0.0)  # computed again, and its gradients
    stage = layers * (again * inputs + (1 - again) * each) + one_layer
    interleaved = np.where(jobs.parts > 1, 1 + (jobs.pp - 1) / (jobs.pp * jobs.parts), 1.0)
    live = np.minimum(jobs.microbatches, jobs.pp) * interleaved
    one = jobs.tokens * jobs.param_bytes * stage
    return one * live, one
