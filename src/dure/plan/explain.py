"""Every term of a prediction, with its formula, its numbers and where its constants come from."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from dure.plan.constants import Constants, described
from dure.plan.jobs import Job
from dure.plan.layouts import Layout
from dure.plan.machines import Machine
from dure.plan.planning import Row, costed

__all__ = ["Term", "explain"]


@dataclass(frozen=True)
class Term:
    """A part of a step's time, or of a rank's memory.

    Attributes:
        name: Of the part.
        value: Seconds, or bytes.
        unit: Which of the two.
        formula: How it is computed, with the names of the constants.
        constants: Each with its value, unit, meaning and source, as sentences.
    """

    name: str
    value: float
    unit: str
    formula: str
    constants: tuple[str, ...]


def explain(job: Job, machine: Machine, layout: Layout) -> tuple[Row, list[Term]]:
    """Return a layout's row, and each term of its time and memory.

    Raises:
        UsageError: The layout has not the machine's ranks.
    """
    row = costed(job, machine, layout)
    used = _values(machine)
    formulas = tomllib.loads((files("dure.plan") / "data" / "terms.toml").read_text())
    return row, [
        _term(name, value, unit, formulas[kind][name], used)
        for kind, unit, parts in (("time", "s", row.time), ("memory", "bytes", row.memory))
        for name, value in parts.items()
    ]


def _values(machine: Machine) -> dict[str, str]:
    """Return a sentence for every constant, with the value that holds for the machine."""
    c = Constants.load().replaced(machine.measured)
    other = "a100" if machine.gpu.kind in ("h100", "b200") else "h100"
    found: dict[str, str] = {}
    for name, constant in described().items():
        if name.endswith(f"_{other}") and name != "host_h100":
            continue
        source = "measured here" if name in machine.measured else constant.source
        value = f"{getattr(c, name):.4g} {constant.unit}"
        found[name] = f"{name} = {value}: {constant.meaning} ({source})"
    return found


def _term(name: str, value: float, unit: str, formula: str, used: dict[str, str]) -> Term:
    words = set(re.findall(r"\w+", formula))
    families = {"gemm", "flash"} & words
    names = [each for each in used if each in words or each.partition("_")[0] in families]
    return Term(name, value, unit, formula, tuple(used[each] for each in names))
