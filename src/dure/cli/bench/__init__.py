"""The benchmark: how fast collectives are on this machine, checked, beside rivals in the same run.

`command` is the command line and `plan` what was asked; `operations` says how bytes are counted.
`measure` takes the samples from `group`s of ranks, each of which runs `rank`; `results` is what
came out, and `table` and `plot` show it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.cli.bench.command import bench

__all__ = ["bench"]


def __getattr__(name: str) -> object:
    """Load the command on first use."""
    if name != "bench":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # lazy: ranks run `rank` from this package and need neither typer nor the launcher
    from dure.cli.bench import command

    return command.bench
