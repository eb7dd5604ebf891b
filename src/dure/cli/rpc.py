"""`dure rpc`: what the workers of this host do with remote calls."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dure.rpc.figures import Figures, Seen, seen

_NO_WORKERS = "no process of yours on this host has called dure.rpc.init_rpc"

commands = typer.Typer(no_args_is_help=True)


@commands.callback()
def _group() -> None:
    """Show what the workers of this host do with remote calls."""


@commands.command(help="Show the calls and references of each worker.")
def top(
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one table, and exit.")] = False,
) -> None:
    """Show a live table of the workers of this host, until interrupted."""
    console = Console()
    before, then = seen(), time.monotonic()
    try:
        with Live(console=console, auto_refresh=False, transient=once) as live:
            while True:
                time.sleep(every)
                now, at = seen(), time.monotonic()
                shown = table(before, now, at - then)
                live.update(shown, refresh=True)
                before, then = now, at
                if once:
                    break
    except KeyboardInterrupt:
        return
    console.print(shown)


def table(before: list[Seen], now: list[Seen], seconds: float) -> Table | Text:
    """Return a table of what workers did between two readings.

    Args:
        before: The first reading; workers that are not in it are shown from their start.
        now: The second reading.
        seconds: Between the two.
    """
    if not now:
        return Text(_NO_WORKERS)
    made = Table(box=None, padding=(0, 2, 0, 0))
    made.add_column("worker", no_wrap=True)
    for title in ("pid", "calls/s", "served/s", "wait", "run", "out MB/s", "in MB/s"):
        made.add_column(title, justify="right", no_wrap=True)
    made.add_column("owns", justify="right")
    made.add_column("refers", justify="right")
    old = {(each.pid, each.name): each.figures for each in before}
    for each in now:
        new = each.figures
        rate = _rates(old.get((each.pid, each.name), Figures()), new, seconds)
        made.add_row(
            Text(each.name),
            str(each.pid),
            f"{rate['made']:,.0f}",
            f"{rate['served']:,.0f}",
            str(new.waiting),
            str(new.running),
            f"{rate['bytes_sent'] / 1e6:,.1f}",
            f"{rate['bytes_received'] / 1e6:,.1f}",
            str(new.owned),
            str(new.held),
        )
    return made


def _rates(old: Figures, new: Figures, seconds: float) -> dict[str, float]:
    return {
        each.name: (getattr(new, each.name) - getattr(old, each.name)) / seconds
        for each in fields(Figures)
    }
