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

__all__ = ["Slots", "read_hostfile", "read_hosts"]

_COUNTED = re.compile(r"(.+?):([0-9]+)")
_LINE = re.compile(r"(\S+)(?:\s+slots=([0-9]+))?")


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
            found += _node_set(part.strip(), None, "--hosts")
    return _merged(found, "--hosts")


def read_hostfile(path: Path) -> tuple[Slots, ...]:
    """Return the hosts of a hostfile, which may be a pipe: `--hostfile <(scontrol show hostnames)`.

    Raises:
        UsageError: The file cannot be read or understood, or ClusterShell is missing.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the hostfile cannot be read", seen=f"{path}: {error}") from None
    found: list[Slots] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        words = _LINE.fullmatch(text)
        if text and words is None:
            raise UsageError(
                "a line of the hostfile cannot be understood",
                seen=f"{path}:{number}: {text!r}",
                fix="Write HOST, or HOST slots=N.",
            )
        if words is not None:
            nproc = int(words[2]) if words[2] else None
            found += _node_set(words[1], nproc, f"{path}:{number}")
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
    counted = _COUNTED.fullmatch(text)
    if counted is not None and text.count(":") == 1:
        text, nproc = counted[1], int(counted[2])
    sets = _node_sets()
    try:
        return [Slots(host=str(name), nproc=nproc) for name in sets.NodeSet(text)]
    except sets.NodeSetException as error:
        raise UsageError(
            f"{where} is not a list of hosts",
            seen=f"{text!r}: {error}",
            fix="Write names such as node[1-4,7], separated by commas.",
        ) from None


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
