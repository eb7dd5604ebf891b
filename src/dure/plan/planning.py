"""Comparison of all layouts of a job on a machine.

`plan` predicts time and memory of every layout in closed form, drops layouts that do not fit, and
keeps for each mesh the best microbatch, schedule and recomputation. Pipelines of the first layouts
are simulated (`dure.schedules`). Layouts whose intervals overlap the winner's are ties: the model
cannot distinguish them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, exp

import numpy as np

from dure.errors import UsageError
from dure.plan.constants import Constants, document
from dure.plan.cost import Column, step_time
from dure.plan.jobs import Job
from dure.plan.layouts import RECOMPUTED, Layout, columns, layouts
from dure.plan.machines import Machine
from dure.plan.peak import peak_memory
from dure.schedules import make_schedule, simulate

__all__ = ["Change", "Plan", "Row", "plan"]

_OP = "plan layouts"
_SAME = 0.005
"""Layouts whose times differ by less are ordered by simplicity."""

_SHOWN = 20  # rows whose pipelines are simulated; the command shows fewer
_SIMULATED_MICROBATCHES = 4  # for each rank of a pipeline; the rest only repeats


@dataclass(frozen=True)
class Row:
    """A layout with its predicted time and memory.

    Attributes:
        layout: The layout.
        time: Seconds of a step by purpose (`data/terms.toml`).
        memory: Bytes of the fullest rank by purpose (`data/terms.toml`).
        tokens: Tokens of a step over all ranks.
        ideal: Seconds for the model's FLOPs at the dense bfloat16 peak.
        spread: Ratio between measurement and prediction that 8 of 10 measurements stay within.
        simulated: Whether the pipeline was simulated.

    Obtained from:
        `Plan.rows` and `Plan.too_large`.
    """

    layout: Layout
    time: dict[str, float]
    memory: dict[str, float]
    tokens: int
    ideal: float
    spread: float
    simulated: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.time.values())

    @property
    def speed(self) -> float:
        """Tokens/s of all ranks."""
        return self.tokens / self.seconds

    @property
    def low(self) -> float:
        """Lower bound of tokens/s: 8 of 10 measurements are between `low` and `high`."""
        return self.speed / self.spread

    @property
    def high(self) -> float:
        """Upper bound of tokens/s: 8 of 10 measurements are between `low` and `high`."""
        return self.speed * self.spread

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's FLOPs per second over the dense bfloat16 peak."""
        return self.ideal / self.seconds

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Change:
    """A single change of the machine after which another mesh is the fastest.

    Attributes:
        what: The changed property: "memory", "link", "network" or "nodes".
        factor: Its new value over the old one.
        text: A description of the change.
        layout: The fastest layout after it.
        speed: Tokens/s of that layout.

    Obtained from:
        `Plan.changes`.
    """

    what: str
    factor: float
    text: str
    layout: Layout
    speed: float


@dataclass(frozen=True)
class Plan:
    """The result of `plan`.

    Attributes:
        job: The training job.
        machine: The machine.
        rows: Layouts that fit, fastest first: the best of each mesh, or all. Layouts of the same
            speed within 0.5 % are ordered by simplicity.
        ties: How many of the first rows cannot be distinguished from the first.
        too_large: Layouts that would be faster than the first but do not fit: for each mesh the
            one that needs the least memory, by memory.
        reasons: A sentence for each of the first rows.
        changes: The smallest changes of the machine after which another mesh wins.
        warnings: Properties of the job that are outside the range of the fit.

    Obtained from:
        `plan`.
    """

    job: Job
    machine: Machine
    rows: tuple[Row, ...]
    ties: int
    too_large: tuple[Row, ...]
    reasons: tuple[str, ...]
    changes: tuple[Change, ...]
    warnings: tuple[str, ...]

    @property
    def simplest(self) -> int:
        """Index of the row with the fewest axes among the ties with the first."""
        return min(range(self.ties), key=lambda i: _complexity(self.rows[i].layout))

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain values, for JSON; each layout also as `text`."""
        found = asdict(self)
        for name in ("rows", "too_large", "changes"):
            for plain, each in zip(found[name], getattr(self, name), strict=True):
                plain["layout"]["text"] = str(each.layout)
                if isinstance(each, Row):
                    of_rows = ("seconds", "speed", "low", "high", "mfu", "peak")
                    plain |= {derived: getattr(each, derived) for derived in of_rows}
        return found


def plan(job: Job, machine: Machine, *, everything: bool = False, changes: bool = True) -> Plan:
    """Compare the layouts of a job on a machine by predicted speed.

    Args:
        job: The training job.
        machine: The machine.
        everything: Whether to keep all layouts, and not only the best of each mesh.
        changes: Whether to search for the smallest changes of the machine after which another mesh
            wins.

    Returns:
        The layouts that fit, fastest first, with reasons and warnings.

    Raises:
        UsageError: No layout divides the job, or none fits; the message names the smallest change
            after which one would.

    Cost:
        Some microseconds per layout, and a few simulated pipelines.

    Example:
        ```python
        from dure.plan import Job, Machine, find_gpu, find_model, plan

        job = Job(find_model("gpt2"), batch_tokens=2**19)
        best = plan(job, Machine(find_gpu("a100"), nodes=1)).rows[0]
        assert best.layout.ranks == 8 and best.speed > 0
        ```
    """
    found = _Costed(job, machine)
    if not len(found.fitting):
        raise _nothing_fits(found)
    order = found.fitting if everything else found.first_of_meshes(found.fitting)
    rows = [found.row(int(i)) for i in order]
    rows[:_SHOWN] = [_simulated(row) for row in rows[:_SHOWN]]
    rows.sort(key=lambda row: (round(np.log(row.seconds) / _SAME), _complexity(row.layout)))
    ties = sum(row.high >= rows[0].low for row in rows)
    return Plan(
        job=job,
        machine=machine,
        rows=tuple(rows),
        ties=ties,
        too_large=tuple(found.too_large(rows[0])),
        reasons=tuple(reason(rows[i], found) for i in range(min(3, len(rows)))),
        changes=tuple(_changes(job, machine, rows[0])) if changes else (),
        warnings=tuple(_warnings(job, machine)),
    )


def usable(machine: Machine) -> float:
    """Return the bytes of a GPU's memory that a job can use."""
    return Constants.load().room * machine.gpu.memory_gb * 1e9


class _Costed:
    """All layouts of a job with their times and memory."""

    def __init__(self, job: Job, machine: Machine, only: Sequence[Layout] | None = None) -> None:
        self.job, self.machine = job, machine
        self.layouts = list(only) if only is not None else layouts(job, machine)
        jobs = columns(job, machine, self.layouts)
        constants = Constants.load().replaced(machine.measured)
        self.memory, self.time = peak_memory(jobs, constants), step_time(jobs, constants)
        self.bytes, self.seconds = (
            np.broadcast_to(sum(of.values()), len(self.layouts)) for of in (self.memory, self.time)
        )
        self.room = usable(machine)
        order = np.argsort(self.seconds, kind="stable")
        self.fitting = order[self.bytes[order] <= self.room]  # fastest first

    def first_of_meshes(self, order: Iterable[int]) -> list[int]:
        """Return the first layout of each mesh, in order."""
        first: dict[Layout, int] = {}
        for i in order:
            first.setdefault(self.layouts[i].mesh, int(i))
        return list(first.values())

    def row(self, i: int) -> Row:
        """Return a layout's row."""
        job, machine = self.job, self.machine
        across = "within" if machine.nodes == 1 else "across"
        return Row(
            layout=self.layouts[i],
            time={name: _at(i, each) for name, each in self.time.items()},
            memory={name: _at(i, each) for name, each in self.memory.items()},
            tokens=job.batch_tokens,
            ideal=job.flops / (machine.gpu.bf16_tflops * 1e12 * machine.ranks),
            spread=exp(document("constants")["fit"][f"left_out_{across}"]),
        )

    def too_large(self, first: Row) -> list[Row]:
        """Return, of each mesh, the smallest of the layouts faster than a row that do not fit.

        Least first.
        """
        faster = (self.bytes > self.room) & (self.seconds < first.seconds * (1 - _SAME))
        order = np.argsort(self.bytes, kind="stable")
        return [self.row(i) for i in self.first_of_meshes(order[faster[order]])]


def _at(i: int, column: Column) -> float:
    """Return a number of a column, or the only one that there is."""
    return float(column[i] if isinstance(column, np.ndarray) else column)


def costed(job: Job, machine: Machine, layout: Layout) -> Row:
    """Return a single layout's row, whether it fits or not.

    Raises:
        UsageError: It has another number of ranks than the machine.
    """
    if layout.ranks != machine.ranks:
        raise UsageError(
            "the layout is not of this machine",
            op=_OP,
            seen=f"{layout} has {layout.ranks} ranks, the machine {machine.ranks}",
        )
    return _simulated(_Costed(job, machine, [layout]).row(0))


def _complexity(layout: Layout) -> tuple[int, int, int, int]:
    """Return the sort key of equally fast layouts: fewer axes, no recomputation, less sharding."""
    return (
        sum(n > 1 for n in (layout.tp, layout.cp, layout.pp)),
        RECOMPUTED.index(layout.recompute) + (layout.parts > 1),
        layout.tp * layout.cp * layout.pp,
        len(layout.strategy),
    )


def _simulated(row: Row) -> Row:
    """Return a row with its pipeline simulated instead of computed in closed form."""
    layout = row.layout
    if layout.pp == 1:
        return row
    busy = sum(row.time[name] for name in row.time if name not in ("bubble", "dp", "optimizer"))
    each = busy / layout.microbatches / layout.parts
    many = min(layout.microbatches, _SIMULATED_MICROBATCHES * layout.pp)
    schedule = make_schedule(
        layout.schedule, stages=layout.pp * layout.parts, microbatches=many, ranks=layout.pp
    )
    share = 1 / (4 if layout.recompute == "full" else 3)  # of the forward pass
    # The slowest rank is put last, where all wait for it; the others take their mean.
    other = row.time["bubble"] / (layout.pp - 1)
    took = [each if rank == layout.pp - 1 else other for rank in schedule.placement]
    found = simulate(
        schedule, {"F": [t * share for t in took], "B": [t * (1 - share) for t in took]}
    )
    bubble = found.step_time - each * layout.parts * many
    return replace(row, time=row.time | {"bubble": bubble}, simulated=True)


# --- why, and what would change it ---------------------------------------------------------------

_SPENT: dict[str, str] = {name: term["said"] for name, term in document("terms")["time"].items()}
_WORTH_SAYING = 0.01  # of a step
_COMPUTING = ("products", "attention", "elementwise", "ends")


def reason(row: Row, found: _Costed) -> str:
    """Return sentences on where a layout's time goes, and why nothing simpler is as good."""
    layout = row.layout
    computing = sum(row.time[name] for name in _COMPUTING)
    largest = max((set(_SPENT) - set(_COMPUTING)), key=lambda name: row.time[name])
    text = f"{layout}: {computing / row.seconds:.0%} of the step is computing"
    if row.time[largest] >= _WORTH_SAYING * row.seconds:
        text += f", {row.time[largest] / row.seconds:.0%} {_SPENT[largest]}"
    every = list(enumerate(found.layouts))
    same = replace(layout.mesh, strategy="ddp")
    others = {
        f"Without {axis}": [i for i, each in every if getattr(each, axis) == 1]
        for axis in ("pp", "cp", "tp")
        if getattr(layout, axis) > 1
    }
    if layout.strategy != "ddp":
        others["With ddp on this mesh"] = [i for i, each in every if each.mesh == same]
    if layout.recompute != "none":
        plain = [i for i, e in every if e.mesh == layout.mesh and e.recompute == "none"]
        if not any(found.bytes[i] <= found.room for i in plain):
            others["Without recomputing"] = plain
    return ". ".join([text, *_beside(row, others, found)]) + "."


def _beside(row: Row, others: dict[str, list[int]], found: _Costed) -> list[str]:
    """Return sentences that compare a row with the best of some sets of layouts."""
    names: dict[int, list[str]] = {}
    sentences: list[str] = []
    for name, each in others.items():
        fitting = [i for i in each if found.bytes[i] <= found.room]
        if fitting:
            names.setdefault(min(fitting, key=lambda i: found.seconds[i]), []).append(name)
        elif each:
            least = min(float(found.bytes[i]) for i in each) / 1e9
            sentences.append(
                f"{name} it takes {least:.0f} GB or more ({found.room / 1e9:.0f} usable)"
            )
    for best, each in names.items():
        other = found.row(best)
        which = " or ".join([each[0], *(name.lower() for name in each[1:])])
        sentences.insert(0, f"{which} the best is {other.layout}: {_slower(other, row)}")
    return sentences


def _slower(other: Row, row: Row) -> str:
    """Return by how much a layout is slower than another, and in which term."""
    ratio = other.seconds / row.seconds
    if abs(ratio - 1) < _SAME:
        return "as fast"
    if ratio < 1:
        return f"{1 / ratio - 1:.0%} faster"
    grown = {name: other.time[name] - row.time[name] for name in _SPENT}
    most = max(grown, key=lambda name: grown[name])
    again = RECOMPUTED.index(other.layout.recompute) > RECOMPUTED.index(row.layout.recompute)
    why = "recomputing" if again and most in _COMPUTING else _SPENT[most]
    slower = f"{ratio - 1:.0%} slower" if ratio < 2 else f"{ratio:.1f} times as slow"
    return f"{slower}, mostly for {why}"


_FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0)
_FACTORS_OF_NODES = (2.0, 0.5, 4.0, 0.25)
_CHANGED = {
    "memory": ("memory_gb", "GB of memory a GPU"),
    "link": ("link_gb_s", "GB/s within a node"),
    "network": ("network_gb_s", "GB/s to other nodes a GPU"),
}


def _changes(job: Job, machine: Machine, first: Row) -> list[Change]:
    """Return, for each property of the machine, the smallest change that alters the winner."""
    found: dict[str, Change] = {}
    for what, factor, text, other in _others(machine):
        change = _winner(job, other, first) if what not in found else None
        if change is not None:
            found[what] = Change(what, factor, text, change.layout, change.speed)
    return sorted(found.values(), key=lambda change: abs(np.log(change.factor)))


def _others(machine: Machine) -> Iterator[tuple[str, float, str, Machine]]:
    """Yield (property, factor, description, machine) for single changes, the smallest first."""
    for factor in (by for each in _FACTORS for by in (each, 1 / each)):
        for what, (name, unit) in _CHANGED.items():
            if what != "network" or machine.nodes > 1:
                old = getattr(machine.gpu, name)
                text = f"with {old * factor:,.4g} {unit} instead of {old:,.4g}"
                yield what, factor, text, machine.with_(**{name: old * factor})
        nodes = machine.nodes * factor
        if nodes == int(nodes) and factor in _FACTORS_OF_NODES:
            text = f"with {nodes:.0f} node{'s' * (nodes > 1)} instead of {machine.nodes}"
            yield "nodes", factor, text, replace(machine, nodes=int(nodes))


def _winner(job: Job, machine: Machine, first: Row) -> Row | None:
    """Return the fastest layout on a changed machine, if another mesh wins by `_SAME`."""
    try:
        costed_ = _Costed(job, machine)
    except UsageError:
        return None
    if not len(costed_.fitting):
        return None
    best = costed_.row(int(costed_.fitting[0]))
    same = _shape(first.layout)
    old = [i for i in costed_.fitting if _shape(costed_.layouts[i]) == same]
    if old and costed_.seconds[old[0]] <= best.seconds * (1 + _SAME):
        return None
    return best


def _shape(layout: Layout) -> tuple[str, int, int, int]:
    """Return the parts of a layout that do not depend on the number of nodes."""
    return (layout.strategy, layout.tp, layout.cp, layout.pp)


def _nothing_fits(found: _Costed) -> UsageError:
    """Return the error that names the smallest change after which a layout fits."""
    job, machine = found.job, found.machine
    i = int(np.argmin(found.bytes))
    least = float(found.bytes[i])
    fixes = [f"GPUs of {ceil(least / Constants.load().room / 1e9)} GB"]
    for factor in (2, 4, 8, 16, 32):
        more = replace(machine, nodes=machine.nodes * factor)
        try:
            if len(_Costed(job, more).fitting):
                fixes.append(f"{more.nodes} nodes")
                break
        except UsageError:
            continue
    length = job.model.length
    while length % 2 == 0 and length > 256:
        length //= 2
        shorter = replace(job, model=replace(job.model, length=length))
        if len(_Costed(shorter, machine).fitting):
            fixes.append(f"sequences of {length}")
            break
    return UsageError(
        "nothing fits",
        op=_OP,
        seen=f"the least is {found.layouts[i]}: {least / 1e9:.0f} GB of "
        f"{machine.gpu.memory_gb:g} GB a GPU",
        fix=f"It would fit with {', or '.join(fixes)}.",
    )


_FITTED = {"nodes": 420, "width": 20_480, "length": 262_144}


def _warnings(job: Job, machine: Machine) -> list[str]:
    """Return the properties of a job that are outside the range of the fit."""
    asked = {"nodes": machine.nodes, "width": job.model.width, "length": job.model.length}
    found = [
        f"{what} {value:,} is beyond what was measured ({_FITTED[what]:,})"
        for what, value in asked.items()
        if value > _FITTED[what]
    ]
    if job.model.width < 768 and machine.gpu.kind != "cpu":
        found.append(f"width {job.model.width} is below what was measured (768)")
    if machine.gpu.kind == "b200":
        found.append(f"{machine.gpu.name}: hardly measured; Hopper's efficiencies are assumed")
    if machine.gpu.kind == "v100":
        found.append(f"{machine.gpu.name}: two rows were measured; Ampere's efficiencies")
    if job.precision == "fp8":
        found.append("8 bits: few rows were measured, and they scatter by 20 %")
    return found
