"""`dure plan --explain`: every term of a layout's time and memory, with formula and constants."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure.plan import Job, Layout, Machine
from dure.plan.explaining import explained

__all__ = ["write_terms"]

_SHOWN = (("time", "s", "{:.4g} s", 1.0), ("memory", "bytes", "{:.2f} GB", 1e9))


def write_terms(job: Job, machine: Machine, layout: Layout, *, as_json: bool) -> None:
    """Print each term of a layout: value, share and formula; numbers; constants with sources.

    Raises:
        UsageError: The layout has not the machine's ranks, or does not divide the job.
    """
    found = explained(job, machine, layout)
    row, inputs, terms = found.row, found.inputs, found.terms
    parts = {"time": row.time, "memory": row.memory}
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
