"""What the demo's runs amount to, and the report of them: one HTML file that needs nothing else.

A single step's loss is noisy, so the mean of the last few steps is shown. Evaluations are not part
of the training time.
"""

from __future__ import annotations

import io
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from typing import Any  # Any: a rank's report as JSON

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure.cli.machine import machine

PHASES = ("data wait", "forward", "backward", "exposed communication", "optimizer", "other")
"""Where the time of a step goes. Exposed communication is the wait for other ranks' gradients;
communication that backward hides is not in it."""

_SMOOTH_STEPS = 11
_WIDTH, _HEIGHT = 560, 260
_COLORS = ("#8a8f98", "#1769c2")


@dataclass(slots=True, kw_only=True)
class Run:
    """One training job, as far as it has come.

    Attributes:
        batch_size: Images per step, of all ranks together.
        facts: Model, data and backend; empty until the first step.
        losses: The loss of each step.
        phases: The seconds of each step's `PHASES`, which add up to the step.
        accuracy: After the last epoch, from 0 to 1.
    """

    ranks: int
    batch_size: int
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    losses: list[float] = field(default_factory=list[float])
    phases: list[Sequence[float]] = field(default_factory=list[Sequence[float]])
    accuracy: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"

    def add(self, event: dict[str, Any]) -> None:
        """Take in what rank 0 reports: facts, a step, or the end of an epoch."""
        if "facts" in event:
            self.facts = event["facts"]
        elif "loss" in event:
            self.losses.append(event["loss"])
            self.phases.append(event["phases"])
        else:
            self.accuracy = event["accuracy"]

    def curve(self) -> list[tuple[float, float]]:
        """Return, for each step, the training time after it, and the mean loss of the last few."""
        times = accumulate(sum(phases) for phases in self.phases)
        ends = range(1, len(self.losses) + 1)
        means = [statistics.fmean(self.losses[max(0, i - _SMOOTH_STEPS) : i]) for i in ends]
        return list(zip(times, means, strict=True))


def comparison(runs: Sequence[Run]) -> list[list[str]]:
    """Return the table, heads first: a value per run, and what the last gains over the first.

    Every run has taken a step at least.
    """
    means = [[statistics.fmean(part) for part in zip(*run.phases, strict=True)] for run in runs]
    steps_s = [sum(phases) for phases in means]
    gain = f"{steps_s[0] / steps_s[-1]:.2f}×"
    images = runs[0].batch_size
    rows = [
        ["", *(run.name for run in runs), "gain"],
        ["images/s", *(f"{images / seconds:,.0f}" for seconds in steps_s), gain],
        ["step time", *(f"{seconds * 1e3:.1f} ms" for seconds in steps_s), gain],
    ]
    for i, name in enumerate(PHASES):
        parts = [(phases[i] * 1e3, phases[i] / sum(phases)) for phases in means]
        rows.append([f"· {name}", *(f"{ms:.2f} ms, {share:.0%}" for ms, share in parts), ""])
    rows.append(["training loss", *(f"{run.curve()[-1][1]:.3g}" for run in runs), ""])
    rows.append(["test accuracy", *(f"{run.accuracy:.1%}" for run in runs), ""])
    return rows


def table(runs: Sequence[Run]) -> Table:
    heads, *rows = comparison(runs)
    made = Table(title="The same training", title_justify="left")
    for head in heads:
        made.add_column(head, justify="right" if head else "left")
    for row in rows:
        made.add_row(*row)
    return made


def report(runs: Sequence[Run], command: str) -> str:
    """Return the report as HTML: the table, facts about run and machine, a chart of the losses."""
    when = time.strftime("%Y-%m-%d %H:%M")
    facts = {"Command": command, "Time": when, **runs[0].facts, **dict(machine())}
    page = Console(record=True, file=io.StringIO(), width=100, highlight=False)
    page.print(table(runs))
    page.print(
        "Training time leaves evaluations out; the loss is the mean of the last "
        f"{_SMOOTH_STEPS} steps. The phases of a step are means over the ranks.\n"
    )
    for name, value in facts.items():
        page.print(Text(f"{name}: {value}"))
    text = page.export_html(code_format="<pre>{code}</pre>", inline_styles=True)
    head = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>dure demo</title>'
    return f"{head}\n{text}\n<h2>Training loss over time in seconds</h2>\n{_chart(runs)}"


def _chart(runs: Sequence[Run]) -> str:
    """Draw the losses, on a logarithmic axis, over training time."""
    curves = [[(at, math.log10(loss)) for at, loss in run.curve()] for run in runs]
    longest = max(curve[-1][0] for curve in curves)
    logs = [log for curve in curves for _, log in curve]
    low, span = min(logs), (max(logs) - min(logs)) or 1.0
    body = [f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="training loss">']
    for i, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        points = " ".join(
            f"{at / longest * _WIDTH:.1f},{_HEIGHT * (1 - (log - low) / span):.1f}"
            for at, log in curve
        )
        end_s, end_log = curve[-1]
        text = escape(f"{run.name}: {10**end_log:.3g} after {end_s:.1f} s")
        body.append(f'<polyline fill="none" stroke="{_COLORS[i]}" points="{points}"/>')
        body.append(f'<text x="250" y="{20 + 18 * i}" fill="{_COLORS[i]}">{text}</text>')
    return "\n".join([*body, "</svg>"])
