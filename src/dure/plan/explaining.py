"""Every term of a layout's time and memory, with its formula and the constants in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any  # Any: a term, as plain values

import numpy as np

from dure.errors import UsageError
from dure.plan.constants import Constants, described, document
from dure.plan.jobs import Job
from dure.plan.layouts import Layout, columns, layouts
from dure.plan.machines import Machine
from dure.plan.planning import Row, costed

__all__ = ["Explained", "explained"]

_IN_FORMULAS = {
    "hbm": "memory",
    "link": "links",
    "net": "network",
    "recompute": "again",
}
"""Columns of `Jobs` whose names in the formulas are others, since constants have theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A layout's terms.

    Attributes:
        row: The layout with its time and memory.
        inputs: The numbers in the formulas, by name.
        terms: Of each: name, value, unit ("s" or "bytes"), formula, and a sentence per constant.
    """

    row: Row
    inputs: dict[str, float]
    terms: list[dict[str, Any]]


def explained(job: Job, machine: Machine, layout: Layout) -> Explained:
    """Return the terms of a layout.

    Raises:
        UsageError: The layout does not have the machine's ranks, or does not divide the job.
    """
    row = costed(job, machine, layout)
    if layout not in layouts(job, machine):
        raise UsageError(
            "the layout does not divide the job",
            op="plan layouts",
            seen=str(layout),
            fix="tp divides the heads of keys and a node, pp at most the layers, with a microbatch "
            "for each stage or more; cp leaves 1,024 tokens of a sequence or more.",
        )
    numbers = columns(job, machine, [layout])
    every = {"tokens": numbers.tokens} | vars(numbers)
    inputs = {_IN_FORMULAS.get(name, name): float(np.ravel(of)[0]) for name, of in every.items()}
    return Explained(row=row, inputs=inputs, terms=_terms(row, machine))


def _terms(row: Row, machine: Machine) -> list[dict[str, Any]]:
    """Return terms of "time" and "memory" as plain values, with their formulas and constants."""
    formulas, used = document("terms"), _sentences(machine)
    found: list[dict[str, Any]] = []
    for kind, unit, values in (("time", "s", row.time), ("memory", "bytes", row.memory)):
        for name, value in values.items():
            formula = formulas[kind][name]["formula"]
            words = set(re.findall(r"\w+", formula))
            families = {"gemm", "flash"} & words
            names = [each for each in used if each in words or each.partition("_")[0] in families]
            term = {"name": name, "value": value, "unit": unit, "formula": formula}
            found.append(term | {"constants": [used[each] for each in names]})
    return found


def _sentences(machine: Machine) -> dict[str, str]:
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
