"""What a flag of `dure run` is: a value, from which the command line, its help and docs are made.

A flag is one of three. A *plain* one takes a text, which `parse` turns into a value. A *switch* has
no `metavar` and takes nothing. A *refused* one is torchrun's alone: it has no counterpart here, and
`refused` says what to use instead.

Dashes and underscores in a spelling are one to the reader, so the table holds dashes only.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Flag", "Group"]


class Group(enum.Enum):
    """The headings of `dure run --help`."""

    PROGRAM = "What to start"
    HOSTS = "Several hosts"
    LIFE = "Failures and restarts"
    OUTPUT = "Output and files"
    MACHINE = "Cores, devices, processes"
    KEY = "Who may join"
    NONE = "Taken for torchrun's sake"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag.

    Args:
        name: What its value is called.
        spellings: How it is written; the first is how it is named in messages.
        group: The heading it stands below.
        means: What it does.
        parse: From the text to the value.
        metavar: What stands for the text in the help; empty for a switch.
        default: What happens without it, in words or as the text that would mean the same.
        torchrun: torchrun's spelling of it; empty if it is Dure's own.
        pet: The variable that stands in for it, without `PET_`; empty if there is none.
        differs: In what it is not torchrun's.
        refused: What a user is told who gives it.
        repeats: It may be given several times, and its value is the tuple of all.
    """

    name: str
    spellings: tuple[str, ...]
    group: Group
    means: str
    parse: Callable[[str], object] = str
    metavar: str = ""
    default: str = ""
    torchrun: str = ""
    pet: str = ""
    differs: str = ""
    refused: str = ""
    repeats: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no text."""
        return not self.metavar

    @property
    def variable(self) -> str:
        """The name of its variable, or an empty text."""
        return f"PET_{self.pet}" if self.pet else ""
