"""`dure plan --explain`: every term of a layout's time and memory, with formula and constants."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure.plan import Job, Layout, Machine
from dure.plan.explaining import explained

__all__ = ["write_terms"]


def write_terms(job: Job, machine: Machine, layout: Layout, *, as_json: bool) -> None:
    """Print each term of a layout: value, share and formula; numbers; constants with sources.

    Raises:
        UsageError: The layout has not the machine's ranks, or does not divide the job.
    """
    found = explained(job, machine, layout)
    row, inputs, terms = found.row, found.inputs, found.terms
    if as_json:
        plain = {"layout": str(layout), "seconds": row.seconds, "peak": row.peak}
        print(json.dumps(plain | {"inputs": inputs, "terms": terms}, indent=1))
        return
    console = Console()
    head = f"{layout}: {row.seconds:.4g} s a step, {row.speed:,.0f} tokens/s, "
    console.print(Text(f"{head}{row.peak / 1e9:.1f} GB of the fullest rank"))
    terms = [term for term in terms if term["value"]]
    for title, unit, scale in (("Time in s", "s", 1.0), ("Memory in GB", "bytes", 1e9)):
        table = Table(box=None, pad_edge=False, title=title, title_justify="left")
        for column in ("term", "value", "share", "formula"):
            table.add_column(column, no_wrap=column != "formula")
        total = sum(term["value"] for term in terms if term["unit"] == unit)
        for term in terms:
            if term["unit"] == unit:
                value, share = term["value"] / scale, term["value"] / total
                table.add_row(term["name"], f"{value:.4g}", f"{share:.1%}", Text(term["formula"]))
        console.print()
        console.print(table)
    console.print(Text("\nNumbers in the formulas:", "bold"))
    console.print(Text(", ".join(f"{name} {value:.6g}" for name, value in inputs.items())))
    console.print(Text("\nConstants:", "bold"))
    for sentence in dict.fromkeys(sentence for term in terms for sentence in term["constants"]):
        console.print(Text(sentence))
