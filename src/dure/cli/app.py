"""The table of subcommands, and how one of them is called."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: a command, or several

from dure.errors import DureError, UsageError

if TYPE_CHECKING:
    import typer

USAGE_EXIT_CODE = 2
UNREAD_EXIT_CODE = 128 + signal.SIGPIPE


COMMANDS = {
    "run": ("run.command:run", "Start a program on several ranks, of one host or more."),
    "demo": ("demo.command:demo", "Train on real images with 2 ranks, and compare with 1."),
    "bench": ("bench.command:bench", "Measure collectives on this machine, and check results."),
    "doctor": (
        "doctor.command:doctor",
        "Check this machine, and advise how to mend faults.",
    ),
    "plan": (
        "plan:commands",
        "Compare layouts of a job before it is started: speed, memory, reasons.",
    ),
    "trace": ("trace:commands", "Show what ranks did last, and what did not match."),
    "view": ("page:view", "Show recorded traces as a page in a browser of this machine."),
    "checkpoint": (
        "checkpoint:commands",
        "Show, verify and compare checkpoints, and make weights of them.",
    ),
    "env": (
        "environment:show_environment",
        "Show what started this process, and the variables that Dure reads.",
    ),
    "version": ("version:show_version", "Show the versions of Dure and of the packages it needs."),
}
"""By name: the function that typer calls, or its own subcommands, and one line about it.

`run` reads its own words, and returns the exit code.
"""


def run_command_line(arguments: list[str], loaded: Callable[[], object] | None = None) -> int:
    """Run `dure ARGUMENTS` and return its exit code.

    A mistake of the user is one line on the standard error, and exit code 2.

    Args:
        arguments: The words after `dure`.
        loaded: Called when all code is imported, before it does anything.

    Raises:
        BrokenPipeError: The output has no reader, and no library has noticed.
    """
    if arguments[:1] == ["--version"]:
        arguments = ["version"]
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    try:
        if wanted == "run":
            run = _load("run")
            if loaded is not None:
                loaded()
            return run(arguments[arguments.index(wanted) + 1 :])
        if wanted is not None and wanted not in COMMANDS and os.path.isfile(wanted):
            raise UsageError(f"unknown command {wanted}", fix=f"Write `dure run {wanted}`.")
        from dure.cli.strict_command import call  # lazy: it imports typer

        app = app_of(wanted)
        if loaded is not None:
            loaded()
        return call(app, arguments)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer and rich exit with 1 then
            return UNREAD_EXIT_CODE
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except DureError as error:
        command = f"dure {wanted}" if wanted in COMMANDS else "dure"
        print(f"{command}: error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE if isinstance(error, UsageError) else 1


def app_of(wanted: str | None) -> typer.Typer:
    """Build the command line, with the code of the one command that is wanted."""
    import typer  # lazy: 35 ms, and `dure run` does not need it

    from dure.cli.strict_command import StrictCommand  # lazy: it imports typer

    app = typer.Typer(
        help="Distributed training for PyTorch that shows which rank went wrong, and where.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_nothing)
    for name, (_, summary) in COMMANDS.items():
        code = _load(name) if name == wanted else _nothing
        if isinstance(code, typer.Typer):
            for command in code.registered_commands:
                command.cls = StrictCommand
            app.add_typer(code, name=name, help=summary)
        else:
            app.command(name, cls=StrictCommand, help=summary)(code)
    return app


def _load(name: str) -> Any:
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(f"dure.cli.{module}"), function)


def _nothing() -> None:
    """Replace a command that is not called, so that its code is not imported."""
