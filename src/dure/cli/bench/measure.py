"""Taking the samples: contestants take turns, so that what else the machine does hits all alike.

For each cell every group first makes its buffers, checks the operation once, and finds out how many
operations fill a sample; then the groups take one sample each, in turn, as often as was asked; then
each checks again. At any time the ranks of one group work, and those of the others sleep.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
from rich.console import Console
from rich.status import Status

from dure.cli.bench.group import Contestant, Group, GroupFailed
from dure.cli.bench.plan import DTYPES, OPERATIONS, Plan, show_size
from dure.cli.bench.results import Cell, Key, Report, rich_tables

_WARM_UP = 0.3
_MAX_REPEATS = 50_000


def note(text: str) -> None:
    print(f"dure bench: note: {text}", file=sys.stderr)


def measure(plan: Plan, contestants: list[Contestant], report: Report, console: Console) -> None:
    """Measure all of `plan` with the contestants, Dure first; add to `report`, and show it.

    Raises:
        GroupFailed: Dure's own ranks failed. A rival that fails is left out from there on.
    """
    for ranks in plan.ranks:
        several = f"{len(contestants)} groups of " if len(contestants) > 1 else ""
        with contextlib.ExitStack() as stack:
            status = stack.enter_context(console.status(f"starting {several}{ranks} ranks"))
            groups = [stack.enter_context(Group(c, ranks)) for c in contestants]
            runners = _accept_ranks(groups, report)
            for op in plan.ops:
                for dtype in plan.dtypes if op != "barrier" else plan.dtypes[:1]:
                    redop = plan.redop if OPERATIONS[op].reduces else ""
                    key = Key(op, dtype, redop, ranks)
                    cells = _table(plan, key, runners, status)
                    console.print(*rich_tables(key, cells, report.contestants))
                    report.cells += cells


def _accept_ranks(groups: list[Group], report: Report) -> list[_Runner]:
    """Wait for every group's ranks; a rival that does not start is left out."""
    runners: list[_Runner] = []
    for group in groups:
        try:
            group.accept_ranks()
        except GroupFailed as failure:
            if group is groups[0]:
                raise
            note(str(failure))
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


def _table(plan: Plan, key: Key, runners: list[_Runner], status: Status) -> list[Cell]:
    """Measure an operation at all sizes, with the contestants that are left."""
    operation, item_bytes = OPERATIONS[key.op], DTYPES[key.dtype]
    counts = [operation.elements(n, item_bytes, key.ranks) for n in plan.sizes]
    cells: list[Cell] = []
    for count in dict.fromkeys(counts if key.op != "barrier" else [0]):
        status.update(f"{key.title}: {show_size(count * item_bytes)}")
        for runner in runners:
            with runner.trying():
                runner.begin(plan, key, count)
        for _ in range(plan.samples):
            for runner in runners:
                with runner.trying():
                    runner.sample()
        for runner in runners:
            with runner.trying():
                runner.end()
        cells += [
            Cell(
                **msgspec.structs.asdict(key),
                num_bytes=count * item_bytes,
                count=count,
                contestant=runner.name,
                samples_s=tuple(runner.samples_s),
                wrong=runner.wrong,
                note=runner.note,
            )
            for runner in runners
        ]
    return cells


@dataclass(slots=True)
class _Runner:
    """A contestant, and what it does in the cell at hand: nothing where `repeats` is 0."""

    name: str
    group: Group
    ours: bool
    repeats: int = 0
    samples_s: list[float] = field(default_factory=list[float])
    wrong: int = 0
    note: str = ""

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Go on behind the block where it fails, unless it is Dure's: a rival is out."""
        try:
            yield
        except GroupFailed as failure:
            if self.ours:
                raise
            self.repeats, self.samples_s, self.note = 0, [], str(failure)
            note(str(failure))

    def begin(self, plan: Plan, key: Key, count: int) -> None:
        """Check the operation, and find out how many fill a sample."""
        if not self.group.alive:
            return
        self.repeats, self.samples_s, self.wrong = 0, [], 0
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
        if not self.note:
            self.wrong = sum(answer["wrong"] for answer in answers)
            one_s = self._time(1)
            one_s = self._time(_fill(_WARM_UP * plan.sample_s, one_s))
            self.repeats = _fill(plan.sample_s, one_s)

    def sample(self) -> None:
        if self.repeats:
            self.samples_s.append(self._time(self.repeats))

    def end(self) -> None:
        if self.repeats:
            self.wrong += sum(answer["wrong"] for answer in self.group.call("finish"))

    def _time(self, repeats: int) -> float:
        """Return the time of one operation, of the slowest rank."""
        return max(a["seconds"] for a in self.group.call("sample", repeats=repeats))


def _fill(seconds: float, one_s: float) -> int:
    """Return how many operations of `one_s` fill so many seconds; at least one."""
    return max(1, min(_MAX_REPEATS, int(seconds / max(one_s, 1e-9))))
