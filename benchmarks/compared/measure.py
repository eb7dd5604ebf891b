"""Taking the samples: contestants take turns, so that what else the machine does hits all alike.

For each cell every group first makes its buffers, checks the operation once, and finds out how many
operations fill a sample; then the groups take one sample each, in turn, as often as was asked; then
each checks again. At any time the ranks of one group work, and those of the others sleep.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace
from rich.console import Console

from compared.group import Contestant, Group, GroupFailed
from compared.plan import ITEM_BYTES, Plan
from compared.results import Cell, Key, Report, rich_table
from dure.cli.bench.operations import OPERATIONS, show_size

_WARM_UP = 0.3
_MAX_REPEATS = 50_000


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


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
            named = _accept_ranks(groups, report)
            for op in plan.ops:
                for dtype in plan.dtypes if op != "barrier" else plan.dtypes[:1]:
                    redop = plan.redop if OPERATIONS[op].reduces else ""
                    key = Key(op, dtype, redop, ranks)
                    cells: list[Cell] = []
                    for count in _counts(plan, key):
                        status.update(f"{key.title}: {show_size(count * ITEM_BYTES[dtype])}")
                        cells += _cells(plan, key, count, named)
                    console.print(rich_table(key, cells, report.contestants))
                    report.cells += cells


def _accept_ranks(groups: list[Group], report: Report) -> dict[str, Group]:
    """Wait for every group's ranks; a rival that does not start is left out."""
    named: dict[str, Group] = {}
    for group in groups:
        try:
            group.accept_ranks()
        except GroupFailed as failure:
            if group is groups[0]:
                raise
            note(str(failure))
            continue
        same = sum(group.label == other.label for other in named.values())
        name = f"{group.label} ({same + 1})" if same else group.label
        named[name] = group
        if name not in report.contestants:
            report.contestants.append(name)
        report.versions[name] = group.version
        if group.copies:
            report.machine[f"Copies, {group.ranks} ranks"] = group.copies
    return named


def _counts(plan: Plan, key: Key) -> list[int]:
    """Return the numbers of elements to measure; 0 stands for the barrier."""
    if key.op == "barrier":
        return [0]
    operation, item_bytes = OPERATIONS[key.op], ITEM_BYTES[key.dtype]
    return list(dict.fromkeys(operation.elements(n, item_bytes, key.ranks) for n in plan.sizes))


def _cells(plan: Plan, key: Key, count: int, named: dict[str, Group]) -> list[Cell]:
    """Measure an operation at one size, with the contestants that are left."""
    cells = {
        name: Cell(
            **msgspec.structs.asdict(key),
            num_bytes=count * ITEM_BYTES[key.dtype],
            count=count,
            contestant=name,
        )
        for name in named
    }
    turns = {n: _turns(plan, cells[n], group) for n, group in named.items() if group.alive}
    ours = next(iter(named))
    while turns:
        for name in list(turns):
            try:
                cells[name] = next(turns[name])
            except StopIteration:
                del turns[name]
            except GroupFailed as failure:
                if name == ours:
                    raise
                note(str(failure))
                cells[name] = replace(cells[name], samples_s=(), note=str(failure))
                del turns[name]
    return list(cells.values())


def _turns(plan: Plan, cell: Cell, group: Group) -> Iterator[Cell]:
    """Yield the cell as far as it has come, whenever it is the next contestant's turn."""
    answers = group.call(
        "prepare",
        op=cell.op,
        dtype=cell.dtype,
        redop=cell.redop,
        count=cell.count,
        arena=group.contestant.arena,
    )
    refused = next((answer["refused"] for answer in answers if "refused" in answer), "")
    if refused:
        yield replace(cell, note=refused)
        return
    wrong = sum(answer["wrong"] for answer in answers)
    one_s = _time(group, 1)
    one_s = _time(group, _fill(_WARM_UP * plan.sample_s, one_s))
    repeats, samples_s = _fill(plan.sample_s, one_s), list[float]()
    for _ in range(plan.samples):
        yield replace(cell, wrong=wrong, samples_s=tuple(samples_s))
        samples_s.append(_time(group, repeats))
    yield replace(cell, wrong=wrong, samples_s=tuple(samples_s))
    wrong += sum(answer["wrong"] for answer in group.call("finish"))
    yield replace(cell, wrong=wrong, samples_s=tuple(samples_s))


def _time(group: Group, repeats: int) -> float:
    """Return the time of one operation, of the slowest rank."""
    return max(answer["seconds"] for answer in group.call("sample", repeats=repeats))


def _fill(seconds: float, one_s: float) -> int:
    """Return how many operations of `one_s` fill so many seconds; at least one."""
    return max(1, min(_MAX_REPEATS, int(seconds / max(one_s, 1e-9))))
