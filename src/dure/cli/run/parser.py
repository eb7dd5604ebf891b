"""A command line of flags, a program and the program's own words, read with argparse.

argparse alone would look for flags among the program's words, too, and refuse those that are
ambiguous. So this module first finds where the program begins. In the words before it dashes and
underscores are the same, and a long flag may be cut short if it stays unambiguous, as in torchrun.
argparse then reads the values, and writes the help.
"""

from __future__ import annotations

import argparse
from argparse import SUPPRESS, Action, ArgumentError, ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dure.errors import UsageError

__all__ = ["Given", "RunParser"]

_MISPLACED = frozenset({"nproc", "nnodes", "hosts", "hostfile", "max_restarts", "endpoint"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the user wrote.

    Args:
        values: By the flags' names (`dest`), of the flags that were given.
        program: Empty if there is none.
        args: The program's own words.
        flags: The words before the program as they were written: a flag's name, and its words.
    """

    values: Mapping[str, object] = field(default_factory=dict[str, object])
    program: str = ""
    args: tuple[str, ...] = ()
    flags: tuple[tuple[str, tuple[str, ...]], ...] = ()


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Names a flag's value once, after all its spellings."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: Action) -> str:
        spellings = ", ".join(action.option_strings)
        return f"{spellings} {action.metavar}" if action.metavar else spellings


class RunParser:
    """The flags, in groups, and how they are read.

    Args:
        usage: The first line of the help.
        description: The text between that line and the flags.
    """

    def __init__(self, usage: str, description: str) -> None:
        self._parser = argparse.ArgumentParser(
            prog="dure run",
            usage=usage,
            description=description,
            formatter_class=_HelpFormatter,
            argument_default=SUPPRESS,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        self._group = self._parser.add_argument_group()
        text = "Show this help, and exit."
        self._help = self._parser.add_argument("-h", "--help", action="help", help=text)
        self.spellings: dict[str, Action] = dict.fromkeys(("-h", "--help"), self._help)
        self.variables: dict[str, Action] = {}

    @property
    def arguments(self) -> argparse.ArgumentParser:
        """The flags alone, as a parent of other parsers."""
        return self._parser

    def start_group(self, title: str) -> None:
        """List the flags that are added from now on below `title`."""
        self._group = self._parser.add_argument_group(title)

    def add(
        self,
        usage: str,
        description: str,
        read: Callable[[str], object] | None = None,
        *,
        dest: str | None = None,
        const: object = True,
        repeats: bool = False,
        variable: bool = False,
        replaced_by: str = "",
    ) -> None:
        """Add a flag.

        Args:
            usage: Its spellings with dashes, and the name of its value, as the help shows them:
                "-x, --export NAME[=VALUE]". A flag without a value is a switch.
            description: Its effect, for the help.
            read: From the text to the value. By default the value is the text; if the usage shows
                words (`auto|none`), one of these.
            dest: The name of its value; by default made of its first long spelling.
            const: The value of a switch that is given.
            repeats: It may be given several times, and its value is the list of all.
            variable: A variable may replace it: PET_ and the name of the last spelling.
            replaced_by: Another variable that may replace it.
        """
        spellings = [word.rstrip(",") for word in usage.split() if word.startswith("-")]
        metavar = usage.rsplit(maxsplit=1)[-1]
        if metavar in spellings:
            more: dict[str, Any] = {"action": "store_const", "const": const}
        else:
            more = {"action": "append" if repeats else "store", "metavar": metavar}
            more["type"] = partial(_read, read or str, metavar)
            more["choices"] = metavar.split("|") if read is None and metavar.islower() else None
        action = self._group.add_argument(*spellings, dest=dest, help=description, **more)
        self.spellings |= dict.fromkeys(spellings, action)
        if variable:
            self.variables["PET_" + spellings[-1][2:].replace("-", "_").upper()] = action
        if replaced_by:
            self.variables[replaced_by] = action

    def parse(self, words: Sequence[str]) -> Given:
        """Read a command line, without the name of the command. `-h` prints the help and exits.

        Raises:
            UsageError: A flag is unknown or its value is wrong.
        """
        flags: list[tuple[str, tuple[str, ...]]] = []
        spelled_out: list[str] = []
        at = 0
        while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
            spelling, text = _split(words[at])
            action = self._named(spelling)
            if action is self._help:  # argparse's own would suppress errors of the output
                print(self._parser.format_help(), end="")
                raise SystemExit(0)
            start, at = at, at + 1
            if text is None and action.nargs != 0 and at < len(words):
                text, at = words[at], at + 1
            flag = action.option_strings[-1]
            spelled_out.append(flag if text is None else f"{flag}={text}")
            flags.append((action.dest, tuple(words[start:at])))
        if at < len(words) and words[at] == "--":
            at += 1
        program, *args = words[at:] or ("",)
        values = self._values(spelled_out)
        return Given(values=values, program=program, args=tuple(args), flags=tuple(flags))

    def parse_variables(self, variables: Mapping[str, str]) -> dict[str, object]:
        """Read the variables that replace flags (`PET_*`): values by the flags' names.

        Raises:
            UsageError: A variable's text is not a value of its flag.
        """
        values: dict[str, object] = {}
        for name, action in sorted(self.variables.items(), reverse=True):  # PET_* come first
            text = variables.get(name, "").strip()
            if text and action.nargs != 0:
                values |= self._values([f"{action.option_strings[-1]}={text}"], f"{name}, ")
            elif text not in ("", "0", "1"):
                raise UsageError(f"{name} must be 0 or 1, got {text!r}")
            elif text:
                values[action.dest] = text == "1"
        return values

    def spelling(self, dest: str) -> str:
        """Return the last spelling of the flag whose value has this name."""
        return next(a.option_strings[-1] for a in self.spellings.values() if a.dest == dest)

    def misplaced(self, given: Given) -> str:
        """Return a line about a flag behind the program that was probably meant for `dure run`.

        A program may well have such a flag. But if it is not given before the program, too, it is
        most likely misplaced. Empty if there is none.
        """
        if "--" in given.args:
            return ""
        for word in given.args:
            spelling = word.partition("=")[0]
            action = self.spellings.get(spelling.replace("_", "-"))
            if not spelling.startswith("--") or action is None:
                continue
            if action.dest in _MISPLACED - given.values.keys():
                return (
                    f"{spelling} comes after {given.program} and is passed to it; flags of "
                    f"`dure run` come before the program: dure run {spelling} ... {given.program}"
                )
        return ""

    def _values(self, words: list[str], source: str = "") -> dict[str, object]:
        try:
            return vars(self._parser.parse_args(words))
        except ArgumentError as error:
            problem = f"{source}{error.argument_name}: {error.message}"
            raise UsageError(problem, fix="See `dure run --help`.") from None

    def _named(self, spelling: str) -> Action:
        """Return the flag of this spelling, or the only one that begins with it."""
        plain = spelling.replace("_", "-")
        if plain in self.spellings:
            return self.spellings[plain]
        found = [text for text in self.spellings if text.startswith(plain)]
        meant = {self.spellings[text] for text in found}
        if len(meant) == 1 and plain.startswith("--") and len(plain) > 3:
            return meant.pop()
        from difflib import get_close_matches  # lazy: for mistakes only

        near = sorted(found) or get_close_matches(plain, self.spellings, 1, 0.75)
        raise UsageError(
            f"unknown flag {spelling}" if len(meant) < 2 else f"{spelling} is ambiguous",
            seen=f"did you mean {' or '.join(near)}?" if near else "",
            fix="See `dure run --help`; flags of the program come after the program.",
        )


def _split(word: str) -> tuple[str, str | None]:
    """Cut a word into the flag and the text that was joined to it."""
    if word.startswith("--"):
        spelling, equals, text = word.partition("=")
        return spelling, text if equals else None
    return word[:2], word[2:].removeprefix("=") or None


def _read(read: Callable[[str], object], form: str, text: str) -> object:
    try:
        return read(text)
    except (ValueError, KeyError):
        raise ArgumentTypeError(f"must be {form}, got {text!r}") from None
