"""typer's commands, with mistakes in a command line in the form of Dure's other errors."""

from __future__ import annotations

from typing import Any  # typer uses classes of its own copy of click

import typer
from typer.core import TyperCommand

from dure.errors import UsageError

__all__ = ["StrictCommand", "call"]

_Mistake: Any = typer.BadParameter.__base__
"""click's UsageError: the base of typer's errors about a command line. Most of them are private."""


def call(app: typer.Typer, arguments: list[str]) -> int:
    """Run `dure ARGUMENTS` and return its exit code.

    Raises:
        UsageError: A mistake in the command line; typer's own text takes several lines.
    """
    try:
        code = app(args=arguments, prog_name="dure", standalone_mode=False)
    except _Mistake as error:
        text = str(error.format_message())
        if not text:  # nothing was given, and typer has printed the help
            return int(error.exit_code)
        command = error.ctx.command_path if error.ctx else "dure"
        raise UsageError(
            text[0].lower() + text[1:].removesuffix("."), fix=f"See `{command} --help`."
        ) from None
    return code if isinstance(code, int) else 0


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
