"""From words and variables to values by name: what the user said, before it is made sense of.

The command line comes first, then the variables `PET_*`. The first word that is no flag is the
program; all behind it is the program's own. As in torchrun, a long flag may be cut short as long as
it stays the only one, and its value may follow `=`; a short flag's value may follow at once (-n2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from dure.cli.run.flags import FLAGS, Flag, find, switch
from dure.errors import UsageError

_MISPLACED = frozenset({"nproc", "nnodes", "hosts", "hostfile", "max_restarts", "endpoint"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the user gave: values by the flags' names, the program (or nothing) and its arguments.

    `flags` are the words before the program as they were written: a flag's name, and its words.
    """

    values: Mapping[str, object] = field(default_factory=dict[str, object])
    program: str = ""
    args: tuple[str, ...] = ()
    flags: tuple[tuple[str, tuple[str, ...]], ...] = ()
    wants_help: bool = False


def parse(words: Sequence[str]) -> Given:
    """Read a command line, without the name of the command.

    Raises:
        UsageError: A flag is unknown, refused, or its value is none.
    """
    values: dict[str, object] = {}
    flags: list[tuple[str, tuple[str, ...]]] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        if words[at] in ("-h", "--help"):
            return Given(wants_help=True)
        spelling, text = _split(words[at])
        flag = _known(spelling)
        start, at = at, at + 1
        if flag.parse is None:
            if text is not None:
                raise UsageError(f"{spelling} takes no value", seen=text)
            values[flag.name] = flag.sets
        else:
            if text is None and at == len(words):
                fix = "See `dure run --help`."
                raise UsageError(f"{spelling} needs a value", seen="nothing", fix=fix)
            if text is None:
                text, at = words[at], at + 1
            value = _value(flag, spelling, text)
            before = values.get(flag.name, ())
            values[flag.name] = (*before, value) if flag.repeats else value  # pyright: ignore
        flags.append((flag.name, tuple(words[start:at])))
    if at < len(words) and words[at] == "--":
        at += 1
    program, *args = words[at:] or ("",)
    return Given(values=values, program=program, args=tuple(args), flags=tuple(flags))


def misplaced(given: Given) -> str:
    """Return a line about a flag that stands behind the program, and so is not ours; or nothing.

    A program may well have such a flag. But who does not give it before the program, too, has most
    likely meant us.
    """
    if "--" in given.args:
        return ""
    for word in given.args:
        flag = find(word.partition("=")[0]) if word.startswith("--") else None
        if flag is not None and flag.name in _MISPLACED - given.values.keys():
            spelling = word.partition("=")[0]
            return (
                f"{spelling} stands behind {given.program}, which gets it as its own; flags of "
                f"`dure run` stand before the program: dure run {spelling} ... {given.program}"
            )
    return ""


def from_variables(variables: Mapping[str, str]) -> tuple[dict[str, object], list[str]]:
    """Read the variables `PET_*`: values by the flags' names, and what to tell of unknown names.

    Raises:
        UsageError: A variable's text is no value.
    """
    flags = {flag.variable: flag for flag in FLAGS if flag.pet}
    values: dict[str, object] = {}
    notes: list[str] = []
    for name, text in sorted(variables.items()):
        flag = flags.get(name)
        if flag is not None:
            if text.strip():
                values[flag.name] = _value(flag, name, text)
        elif near := _near_variable(name, list(flags)):
            notes.append(f"{name} means nothing; did you mean {near}?")
    return values, notes


def _near_variable(name: str, known: list[str]) -> str | None:
    """Return the variable that was probably meant; other programs have names with PET_, too."""
    longer = [other for other in known if other.startswith(name)]
    bare = {other.removeprefix("PET_"): other for other in known}
    close = get_close_matches(name.removeprefix("PET_"), bare, 1, 0.7)
    return longer[0] if longer else bare[close[0]] if close else None


def _split(word: str) -> tuple[str, str | None]:
    """Cut a word into the flag and the text that was joined to it."""
    if word.startswith("--"):
        spelling, equals, text = word.partition("=")
        return spelling, text if equals else None
    return word[:2], word[2:].removeprefix("=") or None


def _known(spelling: str) -> Flag:
    flag = find(spelling) or _abbreviated(spelling)
    if flag.refused:
        raise UsageError(f"{spelling} is not understood here", seen=flag.refused)
    return flag


def _abbreviated(spelling: str) -> Flag:
    """Return the one flag that begins like `spelling`, or say which are near."""
    plain = spelling.replace("_", "-")
    spellings = {text: flag for flag in FLAGS for text in flag.spellings.split()}
    found = [text for text in spellings if text.startswith(plain)]
    meant = {spellings[text].name: spellings[text] for text in found}
    if len(meant) == 1 and plain.startswith("--") and len(plain) > 3:
        return next(iter(meant.values()))
    near = sorted(found) or get_close_matches(plain, spellings, 1)
    raise UsageError(
        f"there is no flag {spelling}" if len(meant) < 2 else f"{spelling} may mean several flags",
        seen=f"did you mean {' or '.join(near)}?" if near else "see `dure run --help`",
        fix="A program's own flags stand behind the program.",
    )


def _value(flag: Flag, source: str, text: str) -> object:
    """Turn a text into the flag's value; `source` is where it stood."""
    try:
        return (flag.parse or switch)(text)
    except ValueError as error:
        raise UsageError(f"{source} must be {error}", seen=repr(text)) from None
