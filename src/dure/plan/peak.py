"""How much memory a rank takes at its peak, for whole columns of jobs; the formula is `memory`'s.

`memory` counts the microbatches that are live at once by walking through the schedule; here they
are counted in closed form (1F1B and interleaved), the stages are alike, and what the allocator and
libraries of a GPU take is added (constants `kept`, `context`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from dure.plan.constants import Constants
from dure.plan.cost import Column, Jobs
from dure.plan.memory import kept_elements

__all__ = ["Peak", "peak_memory"]


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
    layers = jobs.stages
    first, last = (_of_rank(jobs, c, layers, is_last) for is_last in (False, True))
    fuller = sum(last.values()) > sum(first.values())
    return Peak(**{name: np.where(fuller, last[name], first[name]) for name in first})


def _of_rank(
    jobs: Jobs, c: Constants, layers: tuple[Column, Column], is_last: bool
) -> dict[str, Column]:
    """Return the bytes of a pipeline's first or last rank; without a pipeline it is both."""
    own, sharded = jobs.held(layers[is_last]), jobs.zero >= 2
    shard = np.where(sharded, jobs.shard, 1.0)
    kept_bytes = np.where(sharded & (jobs.master_bytes > 0), jobs.master_bytes, jobs.param_bytes)
    moments = np.where(sharded, 8.0, 8.0 + jobs.master_bytes)
    # Gradients of a wider type are added up beside those that a backward pass leaves.
    added_up = np.where(~sharded & (jobs.grad_bytes > jobs.param_bytes), jobs.param_bytes, 0.0)
    scores = c.scores_kept * jobs.tokens * jobs.vocab / jobs.tp
    return {
        "parameters": own * kept_bytes / shard,
        "gradients": own * (jobs.grad_bytes + added_up) / shard,
        "optimizer": own * moments / np.where(jobs.zero == 1, jobs.replicas, shard),
        "gathered": np.where(jobs.shard > 1, _gathered(jobs, own), 0.0) * sharded,
        "activations": _activations(jobs, c, layers[is_last], is_last),
        "scores": scores if is_last else np.where(jobs.pp == 1, scores, 0.0),
        "overhead": np.full_like(own, c.context),
    }


def _gathered(jobs: Jobs, own: Column) -> Column:
    """Return the bytes of what FSDP has whole for a while.

    Parameters of two layers and the ends, or all where zero is 2 or there is a pipeline; gradients
    that are added up over microbatches.
    """
    some = np.minimum(jobs.held(2.0), own)
    held = np.where((jobs.zero == 2) | (jobs.pp > 1), own, some)
    added_up = np.where((jobs.once > 0) & (jobs.microbatches > 1), own, 0.0)
    return np.where(jobs.shared > 0, 0.0, held) * jobs.param_bytes + added_up * jobs.grad_bytes


def _activations(jobs: Jobs, c: Constants, layers: Column, is_last: bool) -> Column:
    """Return the bytes of a rank's activations at their peak."""
    kept = np.where((jobs.compiled > 0) | (jobs.gated == 0), 1.0, c.kept)
    units = (2 + 2 * jobs.gated) * jobs.hidden
    others = kept * kept_elements(jobs.width, jobs.kv_width, jobs.heads, 0)
    gathers = np.where((jobs.blocking > 0) & (jobs.pp > 1), 0.0, c.gathered)
    elements = others + units + 2 * jobs.width * gathers * jobs.tp
    fused = jobs.fused > 0
    scores = np.where(fused, 0.0, 2.5 * jobs.heads * jobs.seq)
    # Recomputed operators: without fused attention its scores; else all but every second product.
    cheap = np.where(fused, 0.4 * elements, elements)
    whole = elements + scores
    each = np.where(jobs.selective > 0, cheap, whole) / jobs.tp
    inputs = jobs.width / np.where(jobs.sp > 0, jobs.tp, 1.0)
    again = jobs.recompute
    stage = layers * (again * inputs + (1 - again) * each)
    interleaved = np.where(jobs.parts > 1, 1 + (jobs.pp - 1) / (jobs.pp * jobs.parts), 1.0)
    live = 1.0 if is_last else np.minimum(jobs.microbatches, jobs.pp) * interleaved
    one_layer = np.where(again > 0, 2 * whole / jobs.tp, 0.0)  # computed again, and its gradients
    return jobs.tokens * jobs.param_bytes * (stage * live + one_layer)
