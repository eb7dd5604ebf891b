"""The demo: train on real images with one rank and with several, compare, report.

`command` is the command line; `train` the program every rank runs, an ordinary one; `events` what
the ranks tell; `results` what it amounts to; `progress`, `report` and `charts` show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.cli.demo.command import demo

__all__ = ["demo"]


def __getattr__(name: str) -> object:
    """Load the command on first use."""
    if name != "demo":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # lazy: ranks run `train` from this package and need neither typer nor the launcher
    from dure.cli.demo import command

    return command.demo
