"""`dure env`: which environment variables Dure reads, and what they are set to."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dure import env

__all__ = ["show_environment"]


def show_environment() -> None:
    """List the environment variables that Dure reads, their values and meanings."""
    table = Table(box=None, pad_edge=False)
    for title in ("variable", "value", "meaning"):
        table.add_column(title, overflow="fold")
    for name, value, meaning in env.describe():
        table.add_row(name, Text("-", style="dim") if value is None else Text(value), meaning)
    Console().print(table)
