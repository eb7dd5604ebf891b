"""Row 8: a pipeline of one stage per rank, validated, proved and simulated; layouts of a job.

Ranks run 32 microbatches per stage with 1F1B: 4,096 of 128 stages. The lists have transfers, as
the runtime executes them, so there are three times as many actions as computations. Layouts are
those that `dure plan` compares, of a model of 8 billion parameters on nodes of 8 H100.
"""

from __future__ import annotations

from counting import processor_time, resident_mb

from dure.plan import Job, Machine, find_gpu, find_model, plan
from dure.schedules import make_schedule, prove_no_deadlock, simulate, validate
from dure.schedules.lower import lower

TITLE = "a pipeline of a stage per rank and 32 microbatches per stage; the layouts of a job"
RANKS = (16, 64, 128, 1024, 16_384)
MOST_STAGES = 128
TOKENS = 1 << 22


def measure(ranks: int) -> dict[str, float]:
    """Compare the layouts; validate, prove and simulate a pipeline that is not too long."""
    figures: dict[str, float] = {}
    if ranks <= MOST_STAGES:
        pipeline(ranks, figures)
    job = Job(find_model("llama3-8b"), batch_tokens=TOKENS)
    machine = Machine(find_gpu("h100"), nodes=ranks // 8)
    with processor_time(figures, "CPU s of comparing layouts"):
        plan(job, machine)
    return figures


def pipeline(ranks: int, figures: dict[str, float]) -> None:
    """Add the figures of a pipeline."""
    grid = make_schedule("1f1b", stages=ranks, microbatches=32 * ranks, ranks=ranks)
    with processor_time(figures, "CPU s of a simulation without transfers"):
        simulate(grid)
    with processor_time(figures, "CPU s of adding transfers"):
        lists = lower(grid)
    figures["actions"] = sum(len(actions) for actions in lists.ranks)
    with processor_time(figures, "CPU s of validation"):
        validate(lists)
    with processor_time(figures, "CPU s of the proof"):
        prove_no_deadlock(lists)
    with processor_time(figures, "CPU s of a simulation"):
        simulate(lists)
    figures["MB of memory"] = resident_mb()
