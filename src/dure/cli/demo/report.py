"""The demo's report: one HTML file that needs nothing else, written from finished runs."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path

import dure
from dure.cli import charts
from dure.cli.charts import Axis, Bar, Series, line_chart, stacked_bars
from dure.cli.demo.events import PHASES
from dure.cli.demo.results import Run, comparison
from dure.cli.machine import machine

_COLOURS = {
    "c0": ("#8a8f98", "#9aa0a8"),
    "c1": ("#1769c2", "#5aa4ee"),
    "p0": ("#b9bec6", "#6b7178"),
    "p1": ("#7fb0e3", "#9cc5ef"),
    "p2": ("#1769c2", "#4a93dd"),
    "p3": ("#e07b39", "#ea9458"),
    "p4": ("#5b9e6f", "#74b588"),
    "p5": ("#d9d2c3", "#4a463d"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What was run: the command line with every option spelled out, and the local time.

    `busy_cores` are the hardware threads that other programs kept busy just before.
    """

    command: str
    when: str
    busy_cores: float


def write_report(path: Path, runs: Sequence[Run], ran: Ran) -> None:
    """Write the report of `runs` (the last against the first) to `path`.

    Raises:
        OSError: The file cannot be written.
    """
    about = [*machine(), ("Others at work", f"{ran.busy_cores:.1f} cores busy just before")]
    several = len(runs) > 1
    heads = ["", *(run.name for run in runs), *(["gain"] if several else [])]
    rows = [[row.label, *row.values, *([row.gain] if several else [])] for row in comparison(runs)]
    facts = [(_what(runs, ran), "What was run"), (about, "On what machine")]
    text = charts.page(
        "dure demo",
        _headline(runs),
        f"{_data(runs[0])}. {ran.when}.",
        _COLOURS,
        [
            charts.section(f"{charts.html_table(heads, rows)}\n<p>{escape(_notes(runs))}</p>"),
            charts.side_by_side([charts.figure(title, svg) for title, svg in _charts(runs)]),
            charts.side_by_side(
                [charts.section(charts.definitions(p), title) for p, title in facts]
            ),
        ],
    )
    path.write_text(text, "utf-8")


def _headline(runs: Sequence[Run]) -> str:
    last = runs[-1]
    accuracies = " and ".join(f"{run.accuracy or 0:.1%}" for run in runs)
    if len(runs) < 2:
        return f"{last.name}: {last.images_per_s:,.0f} images/s, test accuracy {accuracies}"
    gain = last.images_per_s / runs[0].images_per_s
    if last.way:
        memory = f", in {last.memory / runs[0].memory:.2f} of its memory" if last.memory else ""
        ways = f"{last.way} trains {gain:.2f} times as fast as {runs[0].way}{memory}"
        return f"{ways}; test accuracy {accuracies}"
    return f"{last.name} train {gain:.2f} times as fast as one; test accuracy {accuracies}"


def _data(run: Run) -> str:
    start = run.start
    if start is None:
        return ""
    size = f"{start.image_shape[0]} × {start.image_shape[1]} pixels"
    return (
        f"{start.data}: {start.train_images:,} images to learn from, {start.test_images:,} to test "
        f"with, {size}"
    )


def _notes(runs: Sequence[Run]) -> str:
    gap = max(
        (abs(a.loss - b.loss) for a, b in zip(runs[0].points, runs[-1].points, strict=False)),
        default=0.0,
    )
    text = (
        "Training time leaves evaluations out; the loss is the mean of the last 11 steps. "
        "A step lasts as long as its slowest rank; its phases are means over the ranks, and what "
        "these have less than the step is in other. "
        "Exposed communication is the time in which a step does nothing but communicate with other "
        "ranks or wait for them; what backward hides is not in it. Data wait is the time until a "
        "step has its batch."
    )
    if runs[-1].memory:
        text += (
            " Memory is what all ranks take beyond what they had before there was a model, at the "
            "end of an epoch: parameters, gradients, optimizer state, and what PyTorch keeps of "
            "activations. Pages that ranks share count once."
        )
    if len(runs) > 1:
        text += (
            " Every step sees the same images in all runs, so the losses agree up to rounding: the "
            f"largest difference in any step is {gap:.1g}."
        )
    return text


def _charts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    seconds, loss = Axis("training time (s)"), Axis("training loss (nats)")
    by_time: list[Series] = []
    by_step: list[Series] = []
    for run in runs:
        losses = list(zip(run.points, run.smooth_losses(), strict=True))
        by_time.append(Series(run.name, [(p.elapsed_s, mean) for p, mean in losses]))
        by_step.append(Series(run.name, [(p.step, mean) for p, mean in losses]))
    accuracies = [Series(run.name, run.accuracy_curve()) for run in runs]
    percent = Axis("test accuracy", "{:.0%}".format)
    drawn = [
        ("Loss by time", partial(line_chart, series=by_time, x=seconds, y=loss)),
        ("Loss by step", partial(line_chart, series=by_step, x=Axis("step"), y=loss)),
        ("Test accuracy by time", partial(line_chart, series=accuracies, x=seconds, y=percent)),
    ]
    out = [(title, draw(title)) for title, draw in drawn]
    bars = [Bar(run.way or run.name, [run.phases[name] * 1e3 for name in PHASES]) for run in runs]
    parts = [name.replace("communication", "comm.") for name in PHASES]
    title = "Where a step's time goes"
    return [*out, (title, stacked_bars(title, parts, bars, Axis("mean time of a step (ms)")))]


def _what(runs: Sequence[Run], ran: Ran) -> list[tuple[str, str]]:
    start = runs[0].start
    walls = ", ".join(f"{run.name} {run.wall_s:.1f} s" for run in runs)
    pairs = [("Command", ran.command), ("Dure", dure.__version__)]
    if start is not None:
        last = runs[-1].start or start
        pairs += [
            ("PyTorch", start.torch_version),
            ("Network", f"convolutional, {start.parameters:,} parameters"),
            ("Training", f"{start.steps:,} steps of {runs[0].batch_size} images, one core a rank"),
            ("Backend", last.backend),
        ]
    return [
        *pairs,
        ("Wall time", f"{walls}, start to end"),
        ("Python", platform.python_version()),
    ]
