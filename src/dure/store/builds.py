"""Builds of Dure in messages, and the error for jobs whose builds differ.

Every process puts its build into what it writes about itself anyway: members of a rendezvous, the
answer to the first request of a connection to a store, processes of RPC, the state of launchers. A
message that has none was written by a version from before 0.2.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dure import version
from dure.errors import RendezvousError

__all__ = [
    "DIFFERENT",
    "SAME_BUILD",
    "Build",
    "differing",
    "listed",
    "own_build",
    "require_one_build",
]

DIFFERENT = "the ranks run different builds of Dure"

_NAMED = 8
"""How many processes a message names before it only counts them."""

SAME_BUILD = (
    "Install the same version of Dure on all hosts, built from the same commit "
    "(`dure version` prints it)."
)
"""What to do about builds that differ."""


class Build(msgspec.Struct, array_like=True, frozen=True):
    """What must be equal on all processes of a job.

    Attributes:
        protocol: The number of `dure.version.PROTOCOL`.
        version: The version, with the commit if it is not a released one.
    """

    protocol: int = 0
    version: str = "older than 0.2.0"

    def __str__(self) -> str:
        return f"{self.version} (protocol {self.protocol})" if self.protocol else self.version


def own_build() -> Build:
    """Return the build of this process; changed files are not compared."""
    return Build(version.PROTOCOL, version.VERSION.removesuffix(".dirty"))


def differing(found: Iterable[tuple[Build, object]]) -> str:
    """Return a text that lists the processes of each build, or "" if all builds are equal.

    Args:
        found: Of each process its build, and its name in messages.
    """
    named: dict[Build, dict[str, None]] = {}
    for build, process in found:
        named.setdefault(build, {})[str(process)] = None
    if len(named) < 2:
        return ""
    return "; ".join(f"{build}: {listed(list(processes))}" for build, processes in named.items())


def require_one_build(found: Iterable[tuple[Build, object]], **where: object) -> None:
    """Raise if processes that meet have different builds.

    Args:
        found: As for `differing`.
        where: Fields of the error.

    Raises:
        RendezvousError: They have; it names all builds with their processes.
    """
    seen = differing(found)
    if seen:
        raise RendezvousError(DIFFERENT, seen=seen, fix=SAME_BUILD, **where)  # pyright: ignore


def listed(each: Sequence[object]) -> str:
    """Return the first of them by name, and how many more there are."""
    more = f" and {len(each) - _NAMED} more" if len(each) > _NAMED else ""
    return ", ".join(map(str, each[:_NAMED])) + more
