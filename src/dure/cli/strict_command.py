"""A typer command that refuses surplus arguments in the form of Dure's other errors."""

from __future__ import annotations

from typing import Any  # typer passes the context of its own copy of click

from typer.core import TyperCommand

from dure.errors import UsageError

__all__ = ["StrictCommand"]


class StrictCommand(TyperCommand):
    """Names the arguments that a command does not take, and what it takes."""

    allow_extra_args = True  # `parse_args` returns them; typer's own message has no advice

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of a command line.

        Raises:
            UsageError: There are more arguments than the command takes.
        """
        surplus = super().parse_args(ctx, args)
        if surplus:
            names = [str(p.name) for p in self.params if p.param_type_name == "argument"]
            count = f"{len(names)} argument{'s' if len(names) > 1 else ''}: {', '.join(names)}"
            raise UsageError(
                f"unexpected argument {surplus[0]!r}",
                seen=f"`{ctx.command_path}` takes {count if names else 'no arguments'}",
                fix=f"Leave {surplus[0]!r} out; `{ctx.command_path} --help` lists the options.",
            )
        return surplus
