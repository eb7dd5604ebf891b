"""How well `dure plan --here` predicts this machine: its layouts run, beside the plan's figures.

    python benchmarks/plan_here.py [--ranks 2] [--measure]

The machine is measured as `dure plan --here` does it (kept for a day; `--measure`: anew). Then jobs
of one rank and of several train the same Llama (examples/llm), a thread a rank, in turns of a step
each: the median of five steps stands beside the prediction. Memory is what ranks hold of their own
and of what they share (Pss of what is no file), at the peak of steps that are not timed.

With more ranks than cores, figures are printed for what they are. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any  # Any: modules of several kinds, schedules

import torch
import torch.nn.functional as F
from compared.group import Contestant, Group
from compared.rank import serve

import dure
from dure.cli.here import here
from dure.fsdp import fully_shard
from dure.pipelining import PipelineStage
from dure.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B
from dure.plan import Job, Layout, Model
from dure.plan.planning import costed
from dure.tensor.parallel import loss_parallel, parallelize_module

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "llm"))

from axes import peak
from model import Llama, Shape
from model import plan as divided

SHAPE = Shape(vocabulary=2048, width=320, layers=4, heads=4, groups=4, hidden=864, length=256)
SEQUENCES = 4
TURNS = 5
JOB = Job(
    Model(
        SHAPE.vocabulary, SHAPE.width, SHAPE.layers, SHAPE.heads, SHAPE.groups, SHAPE.hidden, 256
    ),
    SEQUENCES * SHAPE.length,
    "fp32",
)


def layouts(ranks: int) -> list[str]:
    """Return what is run: the plan's words."""
    each = SEQUENCES // ranks
    return [
        f"mb={SEQUENCES}",
        "mb=1",
        f"ddp={ranks},mb={each}",
        f"fsdp={ranks},mb={each}",
        f"tp={ranks},mb={SEQUENCES}",
        f"pp={ranks},mb=1",
        *([f"pp={ranks},interleaved=2,mb=1"] if 2 * ranks <= SHAPE.layers else []),
    ]


class Rank:
    """A rank that trains; its methods are the controller's commands."""

    def __init__(self, words: str) -> None:
        torch.set_num_threads(1)
        dure.init_process_group()
        self.rank, self.label, self.version = dure.get_rank(), words, torch.__version__
        self.layout = layout = Layout.parse(words, JOB)
        n = layout.pp * layout.parts
        self.numbers = range(self.rank, n, layout.pp) if layout.pp > 1 else [0]
        self.stages = {i: self.stage(i, n) for i in self.numbers}
        parameters = [p for stage in self.stages.values() for p in stage.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        rows = torch.randint(SHAPE.vocabulary, (SEQUENCES // layout.dp, SHAPE.length + 1))
        self.inputs, self.targets = rows[:, :-1], rows[:, 1:]
        self.schedule: Any = None
        if layout.pp > 1:
            kinds = [PipelineStage(s, i, n, torch.device("cpu")) for i, s in self.stages.items()]
            make: Any = ScheduleInterleaved1F1B if layout.parts > 1 else Schedule1F1B
            given = kinds if layout.parts > 1 else kinds[0]
            self.schedule = make(given, layout.microbatches, loss_fn=loss_fn)

    def stage(self, number: int, n: int) -> Any:
        """Return a stage, divided or sharded as the layout says."""
        part = range(number * SHAPE.layers // n, (number + 1) * SHAPE.layers // n)
        model: Any = Llama(SHAPE, part)
        model.reset_parameters()
        if self.layout.tp > 1:
            mesh = dure.init_device_mesh("cpu", (self.layout.tp,))
            parallelize_module(model, mesh, divided(model))
        if self.layout.strategy == "fsdp":
            for layer in model.layers.values():
                fully_shard(layer)
            fully_shard(model)
        elif self.layout.dp > 1:
            model = dure.DistributedDataParallel(model)
        return model

    def step(self) -> dict[str, float]:
        """Make a step that all ranks begin together; return its seconds."""
        dure.barrier()
        start = time.perf_counter()
        with loss_parallel() if self.layout.tp > 1 else contextlib.nullcontext():
            if self.schedule is not None:
                first, last = 0 in self.stages, max(self.numbers) == self.last
                self.schedule.step(
                    *([self.inputs] if first else []),
                    target=self.targets if last else None,
                    return_outputs=False,
                )
            else:
                size = self.layout.microbatch
                pieces = zip(self.inputs.split(size), self.targets.split(size), strict=True)
                for inputs, targets in pieces:
                    loss_fn(self.stages[0](inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"seconds": time.perf_counter() - start}

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return self.layout.pp * self.layout.parts - 1

    def held(self) -> dict[str, float]:
        """Make steps, and return the bytes that were held at the peak of the last."""
        self.step()
        with peak() as found:
            self.step()
        return {"bytes": float(found[0])}


def loss_fn(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def main() -> None:
    """Measure, train in turns, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="measure the machine anew")
    flags = parser.parse_args()
    machines = {n: here(n, again=flags.measure) for n in {1, flags.ranks}}
    words = layouts(flags.ranks)
    seconds: dict[str, list[float]] = {word: [] for word in words}
    held: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        groups: dict[str, Group] = {}
        for word in words:
            contestant = Contestant(role=(word,), program=(__file__,))
            ranks = Layout.parse(word, JOB).ranks
            groups[word] = stack.enter_context(Group(contestant, ranks))
        for word, group in groups.items():
            group.accept_ranks()
            held[word] = max(answer["bytes"] for answer in group.call("held"))
        for _ in range(TURNS):
            for word, group in groups.items():
                seconds[word].append(max(a["seconds"] for a in group.call("step")))
    cores = os.cpu_count()
    print(
        f"{JOB.model.parameters / 1e6:.1f} M parameters, {JOB.batch_tokens} tokens, {cores} cores"
    )
    print("| layout | step | predicted | | memory | predicted | |")
    print("| --- " + "| ---: " * 6 + "|")
    for word in words:
        layout = Layout.parse(word, JOB)
        row = costed(JOB, machines[layout.ranks], layout)
        step, size = statistics.median(seconds[word]), held[word]
        print(
            f"| {word} ({layout.ranks}) | {step * 1e3:.0f} ms | {row.seconds * 1e3:.0f} ms | "
            f"{row.seconds / step - 1:+.0%} | {size / 1e6:.0f} MB | {row.peak / 1e6:.0f} MB | "
            f"{row.peak / size - 1:+.0%} |"
        )


if __name__ == "__main__":
    if len(sys.argv) > 2 and not sys.argv[1].startswith("--"):
        rank = Rank(sys.argv[2])
        serve(sys.argv[1], rank, rank)
        dure.destroy_process_group()
    else:
        main()
