"""How much memory a rank takes at its peak, for many jobs at once; the formula is `memory`'s.

`memory` counts the microbatches that are live at once by walking through the schedule; here they
are counted in closed form (1F1B and interleaved), the stages are equal, and memory of the allocator
and libraries of a GPU take is added (constants `kept`, `context`).
"""

from __future__ import annotations

from dure.plan.constants import Constants
from dure.plan.cost import Column, Jobs, choose, least
from dure.plan.memory import SCORE_BYTES, kept_elements

__all__ = ["peak_memory"]


def peak_memory(jobs: Jobs, c: Constants) -> dict[str, Column]:
    """Return the bytes of the fullest rank by what they are for (`data/terms.toml`)."""
    first, last = jobs.stages
    at_first, at_last = _of_rank(jobs, c, first, False), _of_rank(jobs, c, last, True)
    fuller = sum(at_last.values()) > sum(at_first.values())
    return {name: choose(fuller, at_last[name], at_first[name]) for name in at_first}


def _of_rank(jobs: Jobs, c: Constants, layers: Column, is_last: bool) -> dict[str, Column]:
    """Return the bytes of a pipeline's first or last rank; without a pipeline it is both."""
    own, sharded = jobs.held(layers), jobs.zero >= 2
    shard = choose(sharded, jobs.shard, 1.0)
    has_copy = jobs.master_bytes > 0
    # Sharded parameters are the float32 copy.
    kept_bytes = choose(sharded & has_copy, jobs.master_bytes, jobs.param_bytes)
    moments = 8.0 + choose(sharded, 0.0, jobs.master_bytes)
    # Gradients of a wider type are added up beside those that a backward pass leaves.
    added_up = (jobs.zero < 2) & (jobs.grad_bytes > jobs.param_bytes)
    scores = SCORE_BYTES * jobs.tokens * jobs.vocab / jobs.tp
    return {
        "parameters": own * kept_bytes / shard,
        "gradients": own * (jobs.grad_bytes + added_up * jobs.param_bytes) / shard,
        "optimizer": own * moments / choose(jobs.zero == 1, jobs.replicas, shard),
        "gathered": _gathered(jobs, own) * (sharded & (jobs.shard > 1)),
        "activations": _activations(jobs, c, layers, is_last),
        "scores": scores if is_last else scores * (jobs.pp == 1),
        "overhead": c.context + 0.0 * own,
    }


def _gathered(jobs: Jobs, own: Column) -> Column:
    """Return the bytes of parameters that FSDP has unsharded for a time.

    Parameters of two layers and the ends, or all where zero is 2 or there is a pipeline; gradients
    that are added up over microbatches.
    """
    some = least(jobs.held(2.0), own)
    held = choose((jobs.zero == 2) | (jobs.pp > 1), own, some) * (1 - jobs.shared)
    added_up = jobs.once * (jobs.microbatches > 1) * own
    return held * jobs.param_bytes + added_up * jobs.grad_bytes


def _activations(jobs: Jobs, c: Constants, layers: Column, is_last: bool) -> Column:
    """Return the bytes of a rank's activations at their peak."""
    kept = choose((jobs.compiled > 0) | (jobs.gated == 0), 1.0, c.kept)
    units = (2 + 2 * jobs.gated) * jobs.hidden
    others = kept * kept_elements(jobs.width, jobs.kv_width, jobs.heads, 0)
    gathered = 2 * jobs.width * jobs.tp * c.gathered * (1 - jobs.regathers)
    elements = others + units + gathered
    # Scores, softmax in 2 bytes, a mask of one; attention in one kernel keeps none of them.
    scores = (1 - jobs.fused) * 2.5 * jobs.heads * jobs.seq
    cheap = elements * choose(jobs.fused, c.selective, 1.0)
    full = elements + scores
    each = choose(jobs.selective, cheap, full) / jobs.tp
    inputs = jobs.width / choose(jobs.sp, jobs.tp, 1.0)
    again = jobs.recompute
    stage = layers * (again * inputs + (1 - again) * each)
    interleaved = 1 + (jobs.parts > 1) * (jobs.pp - 1) / (jobs.pp * jobs.parts)
    live = 1.0 if is_last else least(jobs.microbatches, jobs.pp) * interleaved
    one_layer = (again > 0) * 2 * full / jobs.tp  # computed again, and its gradients
    return jobs.tokens * jobs.param_bytes * (stage * live + one_layer)
