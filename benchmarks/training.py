"""What communication costs a training step: Dure, torch on gloo and on the plug-in, and none.

    python benchmarks/training.py [--models NAME]... [--turns N] [--malloc] [--json FILE]

Each contestant is a job of two ranks with one thread each, which builds the model and waits; then
all take turns, a second of steps each. A step takes as long as its slowest rank. *Exposed* is a
step's time beyond that of `none`, the same two processes without communication; with a sharded
optimizer it can be negative, since each rank updates a part only.

`dure run` starts all of them, and has them keep the memory that a step frees (docs/launch.md). With
`--malloc` three of them run both ways, kept and with `--malloc-defaults`.

The machine must be quiet, and have 10 GiB of memory free.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from pathlib import Path
from typing import Any  # Any: what ranks answer

from compared.group import Contestant, Group, GroupFailed

from dure.cli.machine import conditions

RANK = str(Path(__file__).with_name("training_rank.py"))
MODELS = ("convnet", "gpt10m", "gpt50m")
CONTESTANTS = {
    "none": ("none", "dure"),
    "Dure, DDP": ("ddp", "dure"),
    "Dure, ZeRO": ("zero", "dure"),
    "Dure, ZeRO, host-shared": ("shared", "dure"),
    "Dure, fully_shard": ("fsdp", "dure"),
    "torch, DDP, gloo": ("ddp", "gloo"),
    "torch, DDP, plug-in": ("ddp", "plugin"),
    "torch, ZeRO, gloo": ("zero", "gloo"),
    "torch, fully_shard, gloo": ("fsdp", "gloo"),
    "torch, fully_shard, plug-in": ("fsdp", "plugin"),
}
WITH_DEFAULTS = ("none", "Dure, DDP", "torch, DDP, gloo")
DEFAULTS = ", malloc as it is"
RANKS = 2
TURN_S = 1.0
ALONE = "one process"


class Runner:
    """A contestant's job: how many steps fill its turn, and what they took."""

    def __init__(self, name: str, group: Group) -> None:
        self.name, self.group = name, group
        self.seconds: list[float] = []
        self._count = 0

    def warm_up(self) -> None:
        """Make some steps, and find out how many fill a turn."""
        self.group.accept_ranks()
        self.steps(3)
        self._count = max(2, int(TURN_S / statistics.median(self.steps(2))))

    def steps(self, count: int) -> list[float]:
        """Make steps; return the seconds of each, of its slowest rank."""
        answers = self.group.call("steps", count=count)
        return [max(times) for times in zip(*(a["seconds"] for a in answers), strict=True)]

    def take_turn(self) -> None:
        """Make a turn's steps."""
        self.seconds += self.steps(self._count)


def measure(model: str, turns: int, malloc: bool) -> list[dict[str, Any]]:
    """Run all contestants on one model; return a row for each that did not fail."""
    names = (ALONE, *CONTESTANTS)
    if malloc:
        names = (*WITH_DEFAULTS, *(name + DEFAULTS for name in WITH_DEFAULTS))
    with contextlib.ExitStack() as stack:
        runners: list[Runner] = []
        for name in names:
            ranks = 1 if name == ALONE else RANKS
            role = CONTESTANTS["none" if name == ALONE else name.removesuffix(DEFAULTS)]
            program = ("--malloc-defaults", RANK) if name.endswith(DEFAULTS) else (RANK,)
            contestant = Contestant(role=(*role, model), program=program)
            runner = Runner(name, stack.enter_context(Group(contestant, ranks)))
            try:
                runner.warm_up()
                runners.append(runner)
            except GroupFailed as failure:
                print(f"{name} is left out: {failure}")
        for _ in range(turns):
            for runner in runners:
                runner.take_turn()
        return [row(model, runner, runners) for runner in runners]


def row(model: str, runner: Runner, runners: list[Runner]) -> dict[str, Any]:
    """Return a contestant's figures."""
    none = next(r for r in runners if r.name == "none")
    step, bare = statistics.median(runner.seconds), statistics.median(none.seconds)
    memory = runner.group.call("memory")
    return {
        "model": model,
        "parameters": memory[0]["parameters"],
        "contestant": runner.name,
        "ranks": runner.group.ranks,
        "step_s": step,
        "spread": (max(runner.seconds) - min(runner.seconds)) / step,
        "steps": len(runner.seconds),
        "exposed": None if runner.name in {ALONE, "none"} else (step - bare) / bare,
        "rss_bytes": max(answer["rss"] for answer in memory),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    print(f"\n{rows[0]['model']}, {rows[0]['parameters'] / 1e6:.2f} M parameters, {RANKS} ranks\n")
    print("| | step | exposed | peak RSS a rank |\n| --- | ---: | ---: | ---: |")
    for r in rows:
        exposed = "-" if r["exposed"] is None else f"{r['exposed']:+.1%}"
        step, rss = f"{r['step_s'] * 1e3:.4g} ms", f"{r['rss_bytes'] / 1e6:.0f} MB"
        print(f"| {r['contestant']} | {step} | {exposed} | {rss} |")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--turns", type=int, default=8, help="turns of a second each")
    parser.add_argument("--malloc", action="store_true", help="freed memory kept, and not")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in options.models:
        found = measure(model, options.turns, options.malloc)
        show(found)
        rows += found
    if options.json:
        options.json.write_text(json.dumps({**conditions(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
