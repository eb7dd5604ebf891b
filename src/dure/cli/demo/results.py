"""What the demo's runs amount to: pure arithmetic on the events of their ranks.

A `Run` collects the events of one job as they come. Ranks report the loss over their own part of a
batch; the parts are equal, so the batch's loss is the mean over ranks. A step lasts as long as its
slowest rank; where its time went is the mean over ranks, and what these have less is `other`.
Evaluations are not part of training time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dure.cli.demo.events import PHASES, EpochEnd, Event, Memory, Start, Step

# A single step's loss is noisy; times are read off the mean of a few.
_SMOOTH_STEPS = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The state of a run after a step, of which `elapsed_s` leaves evaluations out."""

    step: int
    loss: float
    elapsed_s: float
    phases: dict[str, float]


@dataclass(slots=True, kw_only=True)
class Run:
    """One training job, as far as it has come.

    Attributes:
        batch_size: Images a step, of all ranks together.
        start: What rank 0 said it would do; None until then.
        points: One for each step that all ranks have finished.
        accuracies: After each epoch: (steps taken, accuracy from 0 to 1).
        way: How ranks share the work, where that is compared: "DDP" or "FSDP".
        wall_s: From starting the processes to the end of the last; 0 until then.
    """

    ranks: int
    batch_size: int
    start: Start | None = None
    points: list[Point] = field(default_factory=list[Point])
    accuracies: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    way: str = ""
    wall_s: float = 0.0
    _memory: dict[int, int] = field(default_factory=dict[int, int])
    _pending: dict[int, list[Step]] = field(default_factory=dict[int, list[Step]])

    def add(self, rank: int, event: Event) -> None:
        """Take in an event of a rank; the ranks' events may come in any mix."""
        match event:
            case Step():
                steps = self._pending.setdefault(event.step, [])
                steps.append(event)
                if len(steps) == self.ranks:
                    self._finish(self._pending.pop(event.step))
            case Start() if rank == 0:
                self.start = event
            case EpochEnd() if rank == 0 and self.start:
                steps_taken = event.epoch * self.start.steps_per_epoch
                self.accuracies.append((steps_taken, event.accuracy))
            case Memory():
                self._memory[rank] = max(event.nbytes, self._memory.get(rank, 0))
            case _:
                pass

    def _finish(self, steps: Sequence[Step]) -> None:
        phases = _mean([s.phases for s in steps])
        slowest_s = max(sum(s.phases.values()) for s in steps)
        phases["other"] += slowest_s - sum(phases.values())
        self.points.append(
            Point(
                step=steps[0].step,
                loss=statistics.fmean(s.loss for s in steps),
                elapsed_s=self.train_s + slowest_s,
                phases=phases,
            )
        )

    @property
    def name(self) -> str:
        ranks = f"{self.ranks} rank" + ("s" if self.ranks != 1 else "")
        return f"{self.way}, {ranks}" if self.way else ranks

    @property
    def memory(self) -> int:
        """The most that training took of all ranks' memory, in bytes; 0 where it is not known."""
        return sum(self._memory.values()) if len(self._memory) == self.ranks else 0

    @property
    def train_s(self) -> float:
        return self.points[-1].elapsed_s if self.points else 0.0

    @property
    def images_per_s(self) -> float:
        return self.batch_size * len(self.points) / self.train_s if self.points else 0.0

    @property
    def accuracy(self) -> float | None:
        return self.accuracies[-1][1] if self.accuracies else None

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase, mean over the steps so far; there must be one."""
        return _mean([p.phases for p in self.points])

    @property
    def communication_share(self) -> float:
        """Share of step time spent waiting for other ranks' gradients, from 0 to 1."""
        waited = sum(p.phases["exposed communication"] for p in self.points)
        return waited / self.train_s if self.train_s else 0.0

    def accuracy_curve(self) -> list[tuple[float, float]]:
        """Return (training time in seconds, accuracy from 0 to 1) after each epoch."""
        elapsed = {p.step: p.elapsed_s for p in self.points}
        return [(elapsed[step], value) for step, value in self.accuracies if step in elapsed]

    def smooth_losses(self) -> list[float]:
        """Return, for each step, the mean loss of the last few steps."""
        losses = [p.loss for p in self.points]
        ends = range(1, len(losses) + 1)
        return [statistics.fmean(losses[max(0, i - _SMOOTH_STEPS) : i]) for i in ends]

    def time_to(self, target: float) -> float | None:
        """Return the training time, in seconds, until the smoothed loss is at most `target`."""
        for point, loss in zip(self.points, self.smooth_losses(), strict=True):
            if loss <= target:
                return point.elapsed_s
        return None


def _mean(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(p[name] for p in phases) for name in PHASES}


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the final table: one value a run, and what the last gains over the first."""

    label: str
    values: tuple[str, ...]
    gain: str = ""


def common_target(runs: Sequence[Run]) -> float:
    """Return a loss that every run reaches a little before its end, to two digits.

    It is 5 percent above the worst final loss, rounded up, so that the flat, noisy tail of training
    does not decide when a run is said to have got there.
    """
    worst = max(run.smooth_losses()[-1] for run in runs) * 1.05
    unit = 10.0 ** (math.floor(math.log10(worst)) - 1)
    return math.ceil(worst / unit) * unit


def comparison(runs: Sequence[Run]) -> list[Row]:
    """Return the final table's rows; every run has finished, with a step at least."""
    target = common_target(runs)
    times = [run.time_to(target) or run.train_s for run in runs]
    phases = [run.phases for run in runs]
    steps_s = [sum(p.values()) for p in phases]
    rows = [
        _row(f"time to training loss {target:.2g}", times, "{:.2f} s"),
        _row("images/s", [r.images_per_s for r in runs], "{:,.0f}", more_is_better=True),
        _row("step time", [seconds * 1e3 for seconds in steps_s], "{:.1f} ms"),
    ]
    for name in PHASES:
        shares = [(p[name], p[name] / (s or 1.0)) for p, s in zip(phases, steps_s, strict=True)]
        texts = (f"{seconds * 1e3:.2f} ms, {share:.0%}" for seconds, share in shares)
        rows.append(Row(f"· {name}", tuple(texts)))
    memory = [run.memory / 1e6 for run in runs if run.way]
    if memory and all(memory):
        rows.append(_row("memory of all ranks", memory, "{:,.0f} MB"))
    return [*rows, _accuracy(runs)]


def _row(label: str, values: Sequence[float], form: str, *, more_is_better: bool = False) -> Row:
    first, last = values[0], values[-1]
    ratio = (last / first if more_is_better else first / last) if first and last else 0.0
    gain = f"{ratio:.2f}×" if len(values) > 1 and ratio else ""
    return Row(label, tuple(form.format(v) for v in values), gain)


def _accuracy(runs: Sequence[Run]) -> Row:
    known = [run.accuracy for run in runs if run.accuracy is not None]
    values = tuple("" if run.accuracy is None else f"{run.accuracy:.1%}" for run in runs)
    if len(known) < 2 or len(known) < len(runs):
        return Row("test accuracy", values)
    # Of the figures as they are shown; + 0.0: never "-0.0".
    gain = round(round(known[-1] * 100, 1) - round(known[0] * 100, 1), 1) + 0.0
    return Row("test accuracy", values, f"{gain:+.1f} points")
