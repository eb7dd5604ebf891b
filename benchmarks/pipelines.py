"""How near the simulator comes: a step of each schedule, measured and simulated.

    dure run --nproc 2 benchmarks/pipelines.py [--turns 4] [--microbatches 8] [--schedules zb-v]

The stages are of one Llama (examples/llm), a thread a rank. Schedules take turns of a few steps.
Times of actions are taken from the spans of steps of their own. The simulator gets the median of
each kind and stage, sends among them, and no time for transfers; its step stands beside the median
of the steps that nobody looked at: from the first start on any rank to the last end, without the
optimizer.

The machine must be quiet.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any  # Any: the classes of schedules take one stage, or several

import torch
import torch.nn.functional as F

import dure as dist
from dure.comm.objects import all_gather_object
from dure.pipelining import PipelineStage
from dure.pipelining.schedules import get_schedule_class
from dure.schedules import Action, Kind, Schedule, find_generator, make_schedule, simulate
from dure.trace import Span, spans

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "llm"))

from model import Llama, Shape

SHAPE = Shape(width=384, layers=8, heads=6, groups=6, hidden=1024, length=64)
ONE_STAGE = ("gpipe", "1f1b")
TWO_STAGES = ("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zb-v", "dualpipe-v")
STEPS_A_TURN = 4

Times = dict[tuple[int, Kind], list[float]]


def loss_fn(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Contestant:
    """A schedule's stages on this rank, and what its steps took, in ms."""

    def __init__(self, name: str, microbatches: int) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        n = ranks * (1 if name in ONE_STAGE else 2)
        made = make_schedule(name, stages=n, microbatches=microbatches, ranks=ranks)
        self.stages = {
            i: Llama(SHAPE, range(i * SHAPE.layers // n, (i + 1) * SHAPE.layers // n))
            for i in made.stages_of(rank)
        }
        kinds = [PipelineStage(s, i, n, torch.device("cpu")) for i, s in self.stages.items()]
        make: Any = get_schedule_class(find_generator(name).torch_name)
        given = kinds[0] if name in ONE_STAGE else kinds
        self.schedule = make(given, microbatches, loss_fn=loss_fn)
        order = self.schedule.pipeline_order_with_comms
        self.lists = Schedule.of_lists([order[r] for r in range(ranks)], name)
        self.rows = torch.randint(SHAPE.vocabulary, (microbatches, SHAPE.length + 1))
        self.measured: list[float] = []
        self.times: Times = defaultdict(list)

    def step(self) -> float:
        """Make a step that all ranks begin together; return what it took of all of them."""
        for stage in self.stages.values():
            stage.zero_grad()
        dist.barrier()
        start = time.monotonic_ns()
        self.schedule.step(
            *([self.rows[:, :-1]] if 0 in self.stages else []),
            target=self.rows[:, 1:] if self.lists.stages - 1 in self.stages else None,
            return_outputs=False,
        )
        seen: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        all_gather_object(seen, (start, time.monotonic_ns()))
        return (max(end for _, end in seen) - min(begin for begin, _ in seen)) / 1e6

    def watched_step(self) -> None:
        """Make a step, and keep what each action took."""
        kept: list[Span] = []
        spans.listeners.append(kept.append)
        self.step()
        spans.listeners.remove(kept.append)
        for span in kept:
            action = Action.parse(str(span.details["action"]))
            took = (span.end_ns - span.start_ns) / 1e6
            self.times[action.parts[0].stage, action.kind].append(took)

    def take_turn(self) -> None:
        """Make some steps of both kinds."""
        self.step()
        self.measured += [self.step() for _ in range(STEPS_A_TURN)]
        for _ in range(STEPS_A_TURN):
            self.watched_step()

    def row(self) -> str:
        """Return a line of the table; on all ranks, which tell each other their times."""
        ranks: list[Times] = [{}] * dist.get_world_size()
        all_gather_object(ranks, dict(self.times))
        medians = {key: statistics.median(t) for each in ranks for key, t in each.items()}
        said = simulate(self.lists, lambda a: medians[a.parts[0].stage, a.kind])
        step, simulated = statistics.median(self.measured), said.step_time
        low, *_, high = statistics.quantiles(self.measured, n=10)
        return (
            f"| {self.lists.name} | {step:.0f} ms | {(high - low) / step:.0%} | {simulated:.0f} ms "
            f"| {simulated / step - 1:+.1%} | {said.bubble:.1%} |"
        )


def main() -> None:
    """Measure, and print a table on one rank."""
    names = (*ONE_STAGE, *TWO_STAGES)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", nargs="+", choices=names, default=names)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group()
    contestants = [Contestant(name, flags.microbatches) for name in flags.schedules]
    for contestant in contestants:
        contestant.step()
    for _ in range(flags.turns):
        for contestant in contestants:
            contestant.take_turn()
    rows = [contestant.row() for contestant in contestants]
    if dist.get_rank() == 0:
        print("| schedule | measured | spread | simulated | | bubble |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |", *rows, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
