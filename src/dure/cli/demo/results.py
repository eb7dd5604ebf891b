"""What the demo's runs amount to, and the report of them: one HTML file that needs nothing else.

A single step's loss is noisy, so the time to a loss is read off the mean of the last few steps.
Evaluations are not part of the training time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any  # Any: what a rank reports as JSON

from dure.cli.machine import machine

PHASES = ("data wait", "forward", "backward", "exposed communication", "optimizer", "other")
"""Where the time of a step goes. Exposed communication is the wait for other ranks' gradients;
communication that backward hides is not in it."""

_SMOOTH_STEPS = 11
_WIDTH, _HEIGHT = 560, 260
_COLORS = ("#8a8f98", "#1769c2")
_STYLE = """\
body { margin: 40px auto; max-width: 720px; font: 15px/1.5 system-ui, sans-serif; }
table { border-collapse: collapse; } th, td { padding: 6px 14px 6px 0; text-align: right; }
th:first-child { text-align: left; } tr { border-bottom: 1px solid #ddd; }
svg { width: 100%; height: auto; } polyline { fill: none; stroke-width: 2; }"""


@dataclass(slots=True, kw_only=True)
class Run:
    """One training job, as far as it has come.

    Attributes:
        name: Such as "2 ranks" or "FSDP, 2 ranks".
        ranks: How many.
        batch_size: Images per step, of all ranks together.
        facts: What is trained on what; empty until the first step.
        losses: The loss of each step.
        phases: The seconds of each step's `PHASES`, which add up to the step.
        accuracies: After each epoch, from 0 to 1.
        memory: Bytes of all ranks beyond what they had before there was a model; 0: not known.
    """

    name: str
    ranks: int
    batch_size: int
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    losses: list[float] = field(default_factory=list[float])
    phases: list[Sequence[float]] = field(default_factory=list[Sequence[float]])
    accuracies: list[float] = field(default_factory=list[float])
    memory: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """Take in what rank 0 reports: facts, a step, or the end of an epoch."""
        if "facts" in event:
            self.facts = event["facts"]
        elif "loss" in event:
            self.losses.append(event["loss"])
            self.phases.append(event["phases"])
        else:
            self.accuracies.append(event["accuracy"])
            self.memory = max(self.memory, event["memory"])

    @property
    def train_s(self) -> float:
        """The time of all steps, in seconds."""
        return sum(sum(phases) for phases in self.phases)

    @property
    def images_per_s(self) -> float:
        """Images per second of training time."""
        return self.batch_size * len(self.losses) / self.train_s if self.losses else 0.0

    def smooth_losses(self) -> list[float]:
        """Return, for each step, the mean loss of the last few steps."""
        ends = range(1, len(self.losses) + 1)
        return [statistics.fmean(self.losses[max(0, i - _SMOOTH_STEPS) : i]) for i in ends]

    def curve(self) -> list[tuple[float, float]]:
        """Return the training time after each step with its smoothed loss."""
        elapsed_s = 0.0
        points: list[tuple[float, float]] = []
        for phases, loss in zip(self.phases, self.smooth_losses(), strict=True):
            elapsed_s += sum(phases)
            points.append((elapsed_s, loss))
        return points

    def time_to(self, target: float) -> float:
        """Return the training time until the smoothed loss is at most `target`, or all of it."""
        return next((at for at, loss in self.curve() if loss <= target), self.train_s)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: one value per run, and what the last run gains over the first."""

    label: str
    values: tuple[str, ...]
    gain: str = ""


def common_target(runs: Sequence[Run]) -> float:
    """Return a loss that every run reaches a little before its end, to two digits.

    It is 5 percent above the worst final loss, rounded up, so that the flat, noisy end of training
    does not decide when a run has reached it.
    """
    worst = max(run.smooth_losses()[-1] for run in runs) * 1.05
    unit = 10.0 ** (math.floor(math.log10(worst)) - 1)
    return math.ceil(worst / unit) * unit


def comparison(runs: Sequence[Run]) -> list[Row]:
    """Return the rows of the table; every run has taken a step at least."""
    target = common_target(runs)
    means = [[statistics.fmean(part) for part in zip(*run.phases, strict=True)] for run in runs]
    steps_s = [sum(phases) for phases in means]
    rows = [
        _row(f"time to training loss {target:.2g}", [r.time_to(target) for r in runs], "{:.2f} s"),
        _row("images/s", [run.images_per_s for run in runs], "{:,.0f}", more_is_better=True),
        _row("step time", [seconds * 1e3 for seconds in steps_s], "{:.1f} ms"),
    ]
    for i, name in enumerate(PHASES):
        parts = [
            (phases[i], phases[i] / (s or 1.0)) for phases, s in zip(means, steps_s, strict=True)
        ]
        values = tuple(f"{seconds * 1e3:.2f} ms, {share:.0%}" for seconds, share in parts)
        rows.append(Row(f"· {name}", values))
    if len({run.ranks for run in runs}) < len(runs) and all(run.memory for run in runs):
        rows.append(_row("memory of all ranks", [r.memory / 1e6 for r in runs], "{:,.0f} MB"))
    accuracies = [run.accuracies[-1] for run in runs]
    points = round(accuracies[-1] * 100, 1) - round(accuracies[0] * 100, 1)
    gain = f"{round(points, 1) + 0.0:+.1f} points" if len(runs) > 1 else ""  # + 0.0: never "-0.0"
    return [*rows, Row("test accuracy", tuple(f"{a:.1%}" for a in accuracies), gain)]


def _row(label: str, values: Sequence[float], form: str, *, more_is_better: bool = False) -> Row:
    first, last = values[0], values[-1]
    ratio = (last / first if more_is_better else first / last) if first and last else 0.0
    gain = f"{ratio:.2f}×" if len(values) > 1 and ratio else ""
    return Row(label, tuple(form.format(value) for value in values), gain)


def report(runs: Sequence[Run], command: str, when: str) -> str:
    """Return the report as HTML: the table, the losses as a chart, and what was run where."""
    heads = ["", *(run.name for run in runs), "gain"]
    rows = [[row.label, *row.values, row.gain] for row in comparison(runs)]
    facts = {"Command": command, "Time": when, **runs[0].facts, **dict(machine())}
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><meta charset="utf-8"><title>dure demo</title>',
            f"<style>{_STYLE}</style>",
            "<h1>dure demo</h1>",
            _table([heads, *rows]),
            "<p>Training time leaves evaluations out; the loss is the mean of the last "
            f"{_SMOOTH_STEPS} steps. The phases of a step are means over the ranks.</p>",
            "<h2>Training loss over time in seconds</h2>",
            _chart(runs),
            "<h2>What was run</h2>",
            _table([[name, str(value)] for name, value in facts.items()]),
        ]
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    cells = ("".join(f"<th>{escape(cell)}</th>" for cell in row) for row in rows)
    return "<table>" + "\n".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _chart(runs: Sequence[Run]) -> str:
    """Draw the losses, on a logarithmic axis, over training time."""
    curves = [run.curve() for run in runs]
    longest = max(run.train_s for run in runs)
    logs = [math.log10(loss) for curve in curves for _, loss in curve if loss > 0]
    low, span = min(logs), (max(logs) - min(logs)) or 1.0
    body = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="training loss">']
    for i, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        points = " ".join(
            f"{at / longest * _WIDTH:.1f},{_HEIGHT * (1 - (math.log10(loss) - low) / span):.1f}"
            for at, loss in curve
            if loss > 0
        )
        text = f"{run.name}: {curve[-1][1]:.3g} after {run.train_s:.1f} s"
        color = _COLORS[i]
        body.append(f'<polyline stroke="{color}" points="{points}"/>')
        body.append(f'<text x="250" y="{20 + 18 * i}" fill="{color}">{escape(text)}</text>')
    return "\n".join([*body, "</svg>"])
