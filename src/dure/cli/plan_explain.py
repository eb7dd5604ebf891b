"""`dure plan --explain`: every term of a layout's time and memory, with formula and constants."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure.errors import UsageError
from dure.plan import Job, Layout, Machine
from dure.plan.constants import Constants, described, document
from dure.plan.layouts import columns, layouts
from dure.plan.planning import costed

__all__ = ["write_terms"]

_IN_FORMULAS = {
    "hbm": "memory",
    "link": "links",
    "net": "network",
    "recompute": "again",
}
"""Columns of `Jobs` whose names in the formulas are others, since constants have theirs."""

_SHOWN = (("time", "s", "{:.4g} s", 1.0), ("memory", "bytes", "{:.2f} GB", 1e9))


def write_terms(job: Job, machine: Machine, layout: Layout, *, as_json: bool) -> None:
    """Print each term of a layout: value, share and formula; numbers; constants with sources.

    Raises:
        UsageError: The layout has not the machine's ranks, or does not divide the job.
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
    parts = {"time": row.time, "memory": row.memory}
    terms = _terms(parts, machine)
    if as_json:
        plain = {"layout": str(layout), "seconds": row.seconds, "peak": row.peak}
        print(json.dumps(plain | {"inputs": inputs, "terms": terms}, indent=1))
        return
    console = Console()
    head = f"{layout}: {row.seconds:.4g} s a step, {row.speed:,.0f} tokens/s, "
    console.print(Text(f"{head}{row.peak / 1e9:.1f} GB of the fullest rank"))
    for kind, unit, form, scale in _SHOWN:
        console.print()
        console.print(_table(kind, [t for t in terms if t["unit"] == unit], form, scale))
        none = [name for name, value in parts[kind].items() if not value]
        if none:
            console.print(Text(f"Nothing: {', '.join(none)}."))
    console.print(Text("\nNumbers in the formulas:", "bold"))
    console.print(Text(", ".join(f"{name} {value:.6g}" for name, value in inputs.items())))
    console.print(Text("\nConstants:", "bold"))
    for sentence in dict.fromkeys(s for t in terms if t["value"] for s in t["constants"]):
        console.print(Text(sentence))


def _table(title: str, terms: list[dict[str, Any]], form: str, scale: float) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title=title.capitalize())
    table.title_justify = "left"
    table.add_column("term", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("formula")
    total = sum(term["value"] for term in terms)
    for term in terms:
        if term["value"]:
            value, share = form.format(term["value"] / scale), f"{term['value'] / total:.1%}"
            table.add_row(term["name"], value, share, Text(term["formula"]))
    return table


def _terms(parts: dict[str, dict[str, float]], machine: Machine) -> list[dict[str, Any]]:
    """Return terms of "time" and "memory" as plain values, with their formulas and constants."""
    formulas, used = document("terms"), _sentences(machine)
    found: list[dict[str, Any]] = []
    for kind, unit, *_ in _SHOWN:
        for name, value in parts[kind].items():
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
