"""Where a training step's time goes: the values that a `StepMeter` gives.

One step of a rank, from the request of its batch to the request of the next step's:

    | data wait | forward | backward | exposed communication | optimizer | other |

*Compute* is forward, backward and optimizer. *Exposed* communication is the time in which the step
only waits for it; communication hidden by backward is not in it. *Other* is the rest: zeroing
gradients, reading the loss, writing a log.

Ranks that average gradients step together, so all have the same step time, and a slow rank shows
only in the waits of the others. Its *own* time shows it: the step without the exposed
communication. The rank with the longest own time has the least to wait, and its wait is the
cost of communication itself; longer waits of the others are imbalance.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dure.training.module_times import ModuleTimes

__all__ = ["FIELDS", "StepReport", "StepSplit", "median_modules", "median_split"]

_MEASURED = ("data_wait_s", "forward_s", "backward_s", "exposed_comm_s", "optimizer_s")
_NAMES = ("data wait", "forward", "backward", "exposed communication", "optimizer", "other")
_MOST_COLUMNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """One step of one rank, or the medians of several.

    Attributes:
        data_wait_s: Waiting for the batch.
        forward_s: From the call of the module to the first gradient: model and loss.
        backward_s: From the first gradient to the last, without what follows.
        exposed_comm_s: Only starting or waiting for communication of gradients.
        optimizer_s: Updating the parameters.
        total_s: The complete step.
        samples: How many this rank trained on.
        num_bytes: Size of the gradients that were reduced, on this rank.

    Obtained from:
        `StepMeter.last`, `StepMeter.steps` and `StepReport.ranks`.
    """

    data_wait_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    exposed_comm_s: float = 0.0
    optimizer_s: float = 0.0
    total_s: float = 0.0
    samples: float = 0
    num_bytes: float = 0

    @property
    def compute_s(self) -> float:
        """Forward, backward and optimizer."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def other_s(self) -> float:
        """What is in the step and in none of its phases."""
        return max(0.0, self.total_s - sum(getattr(self, name) for name in _MEASURED))

    @property
    def own_s(self) -> float:
        """What the step would have taken without communication."""
        return max(0.0, self.total_s - self.exposed_comm_s)

    @property
    def samples_per_s(self) -> float:
        """Samples a second, of this rank alone."""
        return self.samples / self.total_s if self.total_s else 0.0

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase by its name, in the order of a step."""
        seconds = [*(getattr(self, name) for name in _MEASURED), self.other_s]
        return dict(zip(_NAMES, seconds, strict=True))


FIELDS = tuple(StepSplit.__dataclass_fields__)
"""The numbers of a step, in the order in which ranks send them to each other."""


def median_split(steps: Sequence[StepSplit]) -> StepSplit:
    """Return the median of each field; zeros where there is no step."""
    if not steps:
        return StepSplit()
    return StepSplit(**{f: statistics.median(getattr(s, f) for s in steps) for f in FIELDS})


def median_modules(steps: Iterable[Mapping[str, ModuleTimes]]) -> dict[str, ModuleTimes]:
    """Return the medians of each module that communicated in any step."""
    found: dict[str, list[ModuleTimes]] = {}
    for step in steps:
        for name, times in step.items():
            found.setdefault(name, []).append(times)
    fields = ModuleTimes.__dataclass_fields__
    return {
        name: ModuleTimes(**{f: statistics.median(getattr(t, f) for t in times) for f in fields})
        for name, times in found.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What the steps of all ranks amount to.

    Attributes:
        ranks: The medians of each rank's steps.
        num_steps: How many they are the medians of.
        rank: The reporting rank; all ranks have the same report except for this and the following.
        modules: Of a sharded module, the medians of what this rank waited for, by module.

    Obtained from:
        `StepMeter.report`.
    """

    ranks: tuple[StepSplit, ...]
    num_steps: int
    rank: int = 0
    modules: Mapping[str, ModuleTimes] = field(default_factory=dict[str, ModuleTimes])

    @property
    def split(self) -> StepSplit:
        """The mean of the ranks' medians."""
        n = len(self.ranks)
        return StepSplit(**{f: sum(getattr(r, f) for r in self.ranks) / n for f in FIELDS})

    @property
    def samples_per_s(self) -> float:
        """Samples a second, of all ranks together: they go at the pace of the slowest."""
        slowest = max(r.total_s for r in self.ranks)
        return sum(r.samples for r in self.ranks) / slowest if slowest else 0.0

    @property
    def slowest(self) -> int:
        """The rank that the others wait for: the one whose own time is the longest."""
        return max(range(len(self.ranks)), key=lambda r: self.ranks[r].own_s)

    @property
    def imbalance(self) -> float:
        """How much longer the slowest rank's own time is than the mean, as a share of the mean."""
        own = [r.own_s for r in self.ranks]
        mean = sum(own) / len(own)
        return max(own) / mean - 1 if mean else 0.0

    def scalars(self) -> dict[str, float]:
        """Return the numbers that a log of training keeps, by the names that TensorBoard shows."""
        split = self.split
        return {
            "step/total_s": split.total_s,
            "step/compute_s": split.compute_s,
            "step/forward_s": split.forward_s,
            "step/backward_s": split.backward_s,
            "step/optimizer_s": split.optimizer_s,
            "step/exposed_comm_s": split.exposed_comm_s,
            "step/data_wait_s": split.data_wait_s,
            "step/other_s": split.other_s,
            "step/reduced_bytes": split.num_bytes,
            "step/imbalance": self.imbalance,
            "samples/s": self.samples_per_s,
        }

    def __str__(self) -> str:
        """Return a table: the phases of each rank, or of the mean and the slowest of many."""
        if not self.num_steps:
            return "no steps were measured"
        columns = {f"rank {r}": split for r, split in enumerate(self.ranks)}
        if len(columns) > _MOST_COLUMNS:
            slow = f"rank {self.slowest}"
            columns = {f"mean of {len(columns)}": self.split, slow: columns[slow]}
        lines = [_line(f"median of {self.num_steps} steps", [f"{name:>16}" for name in columns])]
        for phase in _NAMES:
            lines.append(_line(phase, [_cell(s.phases()[phase], s) for s in columns.values()]))
        lines.append(_line("step", [_cell(s.total_s, s) for s in columns.values()]))
        mean = self.split
        lines.append(
            f"{self.samples_per_s:,.1f} samples/s, {_bytes(mean.num_bytes)} reduced a step"
        )
        if len(self.ranks) > 1:
            lines.append(
                f"rank {self.slowest} is the slowest: its own work takes {self.imbalance:.1%} more "
                "than the ranks' mean"
            )
        if self.modules:
            heads = ("gathered ahead", "waited for", "reduce")
            lines.append(_line(f"modules of rank {self.rank}", [f"{h:>16}" for h in heads]))
        for name, times in self.modules.items():
            took = (times.ahead_s, times.unshard_s, times.reduce_s)
            lines.append(_line(name, [f"{seconds * 1e3:>13.2f} ms" for seconds in took]))
        return "\n".join(lines)


def _line(name: str, cells: Sequence[str]) -> str:
    return f"{name:<24}" + "".join(cells)


def _cell(seconds: float, step: StepSplit) -> str:
    share = seconds / step.total_s if step.total_s else 0.0
    return f"{seconds * 1e3:>9.2f} ms {share:>3.0%}"


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
