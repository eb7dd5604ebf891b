"""The table of flags, as the text of `dure run --help` and as the tables of docs/launch.md."""

from __future__ import annotations

import textwrap

from dure.cli.run.flag import Flag, Group
from dure.cli.run.flags import FLAGS

__all__ = ["help_page", "markdown"]

_USAGE = """\
Usage: dure run [FLAGS] PROGRAM [ARGUMENTS]...

Start a program on several ranks, and exit with the first failure's code. Flags stand before the
program. They are torchrun's and some more; underscores do for dashes, and a variable PET_<FLAG>
for a flag of torchrun's.

  dure run --nproc 2 train.py --epochs 3
  dure run --nproc gpu --nnodes 1:4 --rdzv-endpoint head:29400 --max-restarts 3 train.py
"""
_COLUMN = 30
_WIDTH = 100


def help_page(width: int = _WIDTH) -> str:
    """Return the help, in lines of at most `width` columns."""
    parts = [_USAGE]
    for group in Group:
        flags = [flag for flag in FLAGS if flag.group is group]
        parts.append(
            "\n".join([f"{group.value}:", *(_entry(flag, width) for flag in flags)]) + "\n"
        )
    return "\n".join(parts)


def _entry(flag: Flag, width: int) -> str:
    short_first = sorted(flag.spellings, key=lambda text: text.startswith("--"))
    head = "  " + ", ".join(short_first) + (f" {flag.metavar}" if flag.metavar else "")
    default = f" [default: {flag.default}]" if flag.default else ""
    indent = " " * _COLUMN
    lines = textwrap.wrap(
        flag.means + default,
        max(width, 60),
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    if len(head) < _COLUMN - 1:
        lines[0] = head.ljust(_COLUMN) + lines[0][_COLUMN:]
    else:
        lines.insert(0, head)
    return "\n".join(lines)


def markdown() -> str:
    """Return the tables of docs/launch.md: torchrun's flags, and those it does not know."""
    known = [flag for flag in FLAGS if flag.torchrun]
    rows = [
        f"| `{_cell(_torchruns(flag))}` | {f'`{flag.variable}`' if flag.pet else ''} "
        f"| {_cell(flag.means)} {_cell(flag.differs)}".rstrip()
        + " |"
        for flag in known
    ]
    own = [
        f"| `{', '.join(flag.spellings)}{' ' if flag.metavar else ''}{_cell(flag.metavar)}` "
        f"| {_cell(flag.means)} |"
        for flag in FLAGS
        if not flag.torchrun
    ]
    return "\n".join(
        [
            "| torchrun's flag | Variable | `dure run` |",
            "| --- | --- | --- |",
            *rows,
            "",
            "| Dure's own flag | |",
            "| --- | --- |",
            *own,
        ]
    )


def _torchruns(flag: Flag) -> str:
    short = [text for text in flag.spellings if not text.startswith("--") and text != "-n"]
    value = f" {flag.metavar}" if flag.metavar else ""
    return ", ".join([*short, flag.torchrun]) + value


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
