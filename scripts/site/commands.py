#!/usr/bin/env python3
"""Write docs/reference/cli.md: the commands of `dure`, their arguments and options.

    scripts/site/commands.py       write the page

`tests/docs/test_command_line.py` fails if the page is not what this script writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import (
    Any,
)  # Any: a command or a parameter of click, which typer may carry inside itself

import typer

from dure.cli.app import COMMANDS, app_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
_HEAD = """# Command line

The commands of `dure`; `dure COMMAND --help` prints the same. `scripts/site/commands.py` writes
this page. Exit codes: 0 is success, 1 a failure, 2 a mistake in the command line. `dure run` exits
with the code of the rank that failed first, or with 128 + N if signal N killed it.
"""
_RUN = """
## dure run

{summary} Its flags, with torchrun's names and variables, are in [Launching](../launch.md#flags).
"""


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD, "\n| Command | Purpose |\n| --- | --- |\n"]
    parts += [f"| [`dure {n}`](#dure-{n}) | {text} |\n" for n, (_, text) in COMMANDS.items()]
    for name, (_, summary) in COMMANDS.items():
        if name == "run":
            parts.append(_RUN.format(summary=summary))
        else:
            command: Any = typer.main.get_command(app_of(name))
            parts.append(f"\n## dure {name}\n\n{summary}\n")
            parts += _command(f"dure {name}", command.commands[name], "###")
    return "".join(parts)


def _command(path: str, command: Any, heading: str) -> Iterator[str]:
    """Yield the parts of one command, and of those below it."""
    context = command.context_class(command, info_name=path)
    rows = [_row(parameter, context) for parameter in command.params]
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"\n```\n{path} {usage}\n```\n"
    if rows := [row for row in rows if row and not row.startswith("| `-h, --help")]:
        yield "\n| Argument or option | Meaning |\n| --- | --- |\n" + "".join(rows)
    for name, below in getattr(command, "commands", {}).items():
        yield f"\n{heading} {path} {name}\n\n{below.help}\n"
        yield from _command(f"{path} {name}", below, heading)


def _row(parameter: Any, context: Any) -> str:
    """Return the row of an argument or option; an empty text if it is hidden."""
    if getattr(parameter, "hidden", False):
        return ""
    name, meaning = parameter.get_help_record(context)
    if "by default" in meaning:  # the default depends on the machine, or is already in the text
        meaning = re.sub(r"\[default: [^;\]]*(?:; )?", "[", meaning).removesuffix("[]")
    name, meaning = (" ".join(text.split()).replace("|", "\\|") for text in (name, meaning))
    return f"| `{name}` | {meaning} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
