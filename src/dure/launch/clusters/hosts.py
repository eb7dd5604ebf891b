"""Which hosts, and how many ranks each: `--hosts` and `--hostfile`.

    --hosts node[1-4,7]          ClusterShell's node sets, with its ranges, ! & ^ and @groups
    --hosts a:2,b:4              how many ranks each host gets
    --hosts slurm                the hosts of the Slurm job around this shell
    --hostfile FILE              one host or node set per line; slots=N; # comments

Hosts keep the order in which they are named, node sets that of ClusterShell. A host that is named
twice with a number of ranks gets the sum, as with mpirun; without one it is a mistake.

ClusterShell is an extra (`pip install '.[cluster]'`): only the ssh launcher of such a job needs it.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dure import env
from dure.errors import UsageError
from dure.placement.nodes import MOST_HOSTS
from dure.trace.plain_files import read_plain

__all__ = ["Slots", "read_hostfile", "read_hosts"]

_RANGE = re.compile(r"([0-9]+)-([0-9]+)(?:/([1-9][0-9]*))?")
_COUNTED = re.compile(r"(.+?):([0-9]+)")
_SLOTS = re.compile(r"slots=([0-9]+)")
_MOST_BYTES = 16 << 20  # of a hostfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """A host, and its number of ranks; None: that of --nproc."""

    host: str
    nproc: int | None = None


def read_hosts(text: str) -> tuple[Slots, ...]:
    """Return the hosts of `--hosts`.

    Raises:
        UsageError: The list cannot be understood, or ClusterShell is missing.
    """
    if text == "slurm":
        text = env.everything().get("SLURM_JOB_NODELIST", "")
        if not text:
            raise UsageError(
                "--hosts slurm: SLURM_JOB_NODELIST is not set",
                fix="Run it in the shell of salloc or in a batch script.",
            )
    found: list[Slots] = []
    for part in re.split(r",(?![^\[\]]*\])", text):  # at the commas outside brackets
        if part.strip():
            found += _node_set(part, None, "--hosts")
    return _merged(found, "--hosts")


def read_hostfile(path: Path) -> tuple[Slots, ...]:
    """Return the hosts of a hostfile, which may be a pipe: `--hostfile <(scontrol show hostnames)`.

    Raises:
        UsageError: The file cannot be read or understood, or ClusterShell is missing.
    """
    try:
        lines = read_plain(path, _MOST_BYTES, pipe=True).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the hostfile cannot be read", seen=f"{path}: {error}") from None
    found: list[Slots] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            found += _node_set(words[0], _slots(words[1:], f"{path}:{number}"), f"{path}:{number}")
    return _merged(found, str(path))


def _node_sets() -> Any:
    """Return ClusterShell's module of node sets."""
    try:
        return importlib.import_module("ClusterShell.NodeSet")
    except ImportError as error:
        raise UsageError(
            "starting on several hosts needs ClusterShell",
            seen=str(error),
            fix="Install the extra, in the checkout of Dure: pip install '.[cluster]'.",
        ) from None


def _node_set(text: str, nproc: int | None, where: str) -> list[Slots]:
    """Return the hosts of one node set, which may end in `:N`."""
    text = text.strip()
    counted = _COUNTED.fullmatch(text)
    if counted is not None and text.count(":") == 1:
        text, nproc = counted[1], int(counted[2])
    if nproc == 0:
        raise UsageError("a host needs a rank", seen=f"{where}: {text} gets 0")
    sets = _node_sets()
    try:
        sizes = [(int(b) - int(a)) // int(step or 1) for a, b, step in _RANGE.findall(text)]
        if max(sizes, default=0) >= MOST_HOSTS or len(nodes := sets.NodeSet(text)) > MOST_HOSTS:
            raise UsageError(f"{where} names more than {MOST_HOSTS:,} hosts", seen=repr(text))
        names = [str(name) for name in nodes]
    except sets.NodeSetException as error:
        raise UsageError(f"{where} is not a list of hosts", seen=f"{text!r}: {error}") from None
    for name in names:
        if not name or name.startswith("-") or any(c.isspace() for c in name):
            raise UsageError("invalid host name", seen=f"{where}: {name!r}")
    return [Slots(host=name, nproc=nproc) for name in names]


def _slots(words: list[str], where: str) -> int | None:
    """Return N of `slots=N` among the words after a host."""
    nproc: int | None = None
    for word in words:
        found = _SLOTS.fullmatch(word)
        if found is None:
            raise UsageError(
                "a line of the hostfile cannot be understood",
                seen=f"{where}: {word!r}",
                fix="Write HOST, or HOST slots=N.",
            )
        nproc = int(found[1])
    return nproc


def _merged(found: list[Slots], where: str) -> tuple[Slots, ...]:
    if not found:
        raise UsageError("no hosts given", seen=where)
    by_host: dict[str, int | None] = {}
    for slots in found:
        if slots.host not in by_host:
            by_host[slots.host] = slots.nproc
            continue
        before = by_host[slots.host]
        if before is None or slots.nproc is None:
            raise UsageError(
                "a host is named twice",
                seen=f"{where}: {slots.host}",
                fix=f"Give its number of ranks: {slots.host}:N.",
            )
        by_host[slots.host] = before + slots.nproc
    return tuple(Slots(host=host, nproc=nproc) for host, nproc in by_host.items())
