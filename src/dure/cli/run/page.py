"""The table of flags, as the text of `dure run --help` and as the tables of docs/launch.md."""

from __future__ import annotations

import textwrap

from dure.cli.run.flags import FLAGS, GROUPS, Flag

__all__ = ["help_page", "markdown"]

_USAGE = """\
Usage: dure run [FLAGS] PROGRAM [ARGUMENTS]...

Start a program on several ranks, and exit with the first failure's code. Flags stand before the
program. They are torchrun's and some more; underscores do for dashes, and a variable PET_<FLAG>
for a flag of torchrun's.

  dure run --nproc 2 train.py --epochs 3
  dure run --nproc gpu --nnodes 1:4 --rdzv-endpoint head:29400 --max-restarts 3 train.py
"""
_INDENT = " " * 30


def help_page(width: int = 100) -> str:
    """Return the help, in lines of at most `width` columns."""
    parts = [_USAGE]
    for heading, flags in GROUPS.items():
        parts += [f"{heading}:", *(_entry(flag, width) for flag in flags), ""]
    return "\n".join(parts)


def _entry(flag: Flag, width: int) -> str:
    short_first = sorted(flag.spellings.split(), key=lambda text: text.startswith("--"))
    head = f"  {', '.join(short_first)} {flag.metavar}".rstrip()
    default = f" [default: {flag.default}]" if flag.default else ""
    lines = textwrap.wrap(
        flag.means + default,
        max(width, 60),
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_on_hyphens=False,
    )
    if len(head) < len(_INDENT) - 1:
        lines[0] = head.ljust(len(_INDENT)) + lines[0].lstrip()
    else:
        lines.insert(0, head)
    return "\n".join(lines)


def markdown() -> str:
    """Return the tables of docs/launch.md: torchrun's flags, and those it does not know."""
    out = ["| torchrun's flag | Variable | `dure run` |", "| --- | --- | --- |"]
    for flag in FLAGS:
        if flag.torchrun:
            short = [s for s in flag.spellings.split() if s[1] != "-" and s != "-n"]
            spelling = f"{', '.join([*short, flag.torchruns])} {flag.metavar}".strip()
            variable = f"`{flag.variable}`" if flag.pet else ""
            means = f"{flag.means} {flag.differs}".strip()
            out.append(f"| `{_cell(spelling)}` | {variable} | {_cell(means)} |")
    out += ["", "| Dure's own flag | |", "| --- | --- |"]
    for flag in FLAGS:
        if not flag.torchrun:
            spelling = f"{flag.spellings.replace(' ', ', ')} {flag.metavar}".strip()
            out.append(f"| `{_cell(spelling)}` | {_cell(flag.means)} |")
    return "\n".join(out)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
