"""Taking the samples: contestants take turns, so that what else the machine does hits all alike.

For each cell every group first makes its buffers, checks the operation once, and finds out how many
operations fill a sample; then the groups take one sample each, in turn, as often as was asked; then
each checks again. At any time the ranks of one group work, and those of the others sleep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from dure.cli.bench.group import Contestant, Group, GroupFailed
from dure.cli.bench.operations import DTYPES, OPERATIONS
from dure.cli.bench.plan import Plan
from dure.cli.bench.results import Cell, Key, Report

__all__ = ["Progress", "measure"]

_WARM_UP = 0.3
_MAX_REPEATS = 50_000


class Progress:
    """Told what goes on; this one shows nothing."""

    def starting(self, ranks: int, contestants: int) -> None:
        """Groups of `ranks` are being started."""

    def cell(self, key: Key, num_bytes: int) -> None:
        """A cell is about to be measured."""

    def table(self, key: Key, cells: list[Cell]) -> None:
        """All cells of a table have been measured."""

    def note(self, text: str) -> None:
        """Something the user should know."""


def measure(plan: Plan, contestants: list[Contestant], report: Report, progress: Progress) -> None:
    """Measure all of `plan`; add to `report` as it comes.

    Args:
        plan: What to measure.
        contestants: Dure first, then the rivals.
        report: Gets versions, names and cells.
        progress: Is told.

    Raises:
        GroupFailed: Dure's own ranks failed. A rival that fails is left out from there on.
    """
    for ranks in plan.ranks:
        progress.starting(ranks, len(contestants))
        with contextlib.ExitStack() as stack:
            groups = [stack.enter_context(Group(c, ranks)) for c in contestants]
            table = _Table(plan, _meet(groups, report, progress), progress)
            for op in plan.ops:
                for dtype in plan.dtypes if op != "barrier" else plan.dtypes[:1]:
                    redop = plan.redop if OPERATIONS[op].reduces else ""
                    report.cells += table.measure(Key(op, dtype, redop, ranks))


def _meet(groups: list[Group], report: Report, progress: Progress) -> list[_Runner]:
    """Wait for every group's ranks; a rival that does not start is left out."""
    runners: list[_Runner] = []
    for group in groups:
        try:
            group.meet()
        except GroupFailed as failure:
            if group is groups[0]:
                raise
            progress.note(str(failure))
            continue
        same = sum(group.label == other.group.label for other in runners)
        name = f"{group.label} ({same + 1})" if same else group.label
        runners.append(_Runner(name, group, ours=group is groups[0]))
        if name not in report.contestants:
            report.contestants.append(name)
        report.versions[name] = group.version
        if group.copies:
            report.machine[f"Copies, {group.ranks} ranks"] = group.copies
    return runners


@dataclass(slots=True)
class _Runner:
    """A contestant, and what it does in the cell at hand."""

    name: str
    group: Group
    ours: bool
    repeats: int = 0
    samples_s: list[float] = field(default_factory=list[float])
    wrong: int = 0
    note: str = ""

    def begin(self, plan: Plan, key: Key, count: int) -> None:
        """Check the operation, and find out how many fill a sample."""
        self.repeats, self.samples_s, self.wrong, self.note = 0, [], 0, ""
        answers = self.group.call(
            "prepare",
            op=key.op,
            dtype=key.dtype,
            redop=key.redop,
            count=count,
            root=plan.root,
            arena=self.group.contestant.arena,
        )
        self.note = next((a["refused"] for a in answers if "refused" in a), "")
        if self.note:
            return
        self.wrong = sum(answer["wrong"] for answer in answers)
        one_s = self._sample(1)
        one_s = self._sample(_fill(_WARM_UP * plan.sample_s, one_s))
        self.repeats = _fill(plan.sample_s, one_s)

    def sample(self) -> None:
        """Take one sample."""
        self.samples_s.append(self._sample(self.repeats))

    def end(self) -> None:
        """Check again."""
        self.wrong += sum(answer["wrong"] for answer in self.group.call("finish"))

    def _sample(self, repeats: int) -> float:
        """Return the time of one operation, of the slowest rank."""
        return max(a["seconds"] for a in self.group.call("sample", repeats=repeats))


@dataclass(slots=True)
class _Table:
    """Measures one table after the other, with the contestants that are left."""

    plan: Plan
    runners: list[_Runner]
    progress: Progress

    def measure(self, key: Key) -> list[Cell]:
        """Measure an operation at all sizes."""
        operation = OPERATIONS[key.op]
        item_bytes = DTYPES[key.dtype]
        counts = [operation.elements(n, item_bytes, key.ranks) for n in self.plan.sizes]
        if key.op == "barrier":
            counts = [0]
        cells: list[Cell] = []
        for count in dict.fromkeys(counts):
            self.progress.cell(key, count * item_bytes)
            cells += self._row(key, count, item_bytes)
        self.progress.table(key, cells)
        return cells

    def _row(self, key: Key, count: int, item_bytes: int) -> list[Cell]:
        """Measure one size."""
        for runner in self.runners:
            self._guard(runner, lambda who: who.begin(self.plan, key, count))
        for _ in range(self.plan.samples):
            for runner in self.runners:
                if runner.repeats:
                    self._guard(runner, _Runner.sample)
        for runner in self.runners:
            if runner.repeats:
                self._guard(runner, _Runner.end)
        return [
            Cell(
                **msgspec.structs.asdict(key),
                num_bytes=count * item_bytes,
                count=count,
                contestant=runner.name,
                samples_s=tuple(runner.samples_s),
                wrong=runner.wrong,
                note=runner.note,
            )
            for runner in self.runners
        ]

    def _guard(self, runner: _Runner, act: Callable[[_Runner], None]) -> None:
        """Let a runner act; a rival that fails is out, and the rest goes on."""
        if not runner.group.alive:
            return
        try:
            act(runner)
        except GroupFailed as failure:
            if runner.ours:
                raise
            runner.repeats, runner.samples_s, runner.note = 0, [], str(failure)
            self.progress.note(str(failure))


def _fill(seconds: float, one_s: float) -> int:
    """Return how many operations of `one_s` fill so many seconds; at least one."""
    return max(1, min(_MAX_REPEATS, int(seconds / max(one_s, 1e-9))))
