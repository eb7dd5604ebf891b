"""Lines of the log about groups that were made, and about the memory of this host."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from dure import native
from dure.comm.group import GroupSpec, ProcessGroup, call_log
from dure.comm.memory import limits_of_heap
from dure.store.rendezvous import Rendezvous, RendezvousMember
from dure.store.system import control_groups, cpu_quota, kernel_text
from dure.trace import logs

__all__ = ["report_group", "report_host"]

_log = logs.logger("comm")
_PLAIN = ("", "default_pg")
_reported: set[int] = set()
"""Processes that have reported their host."""


@logs.never_fails
def report_group(group: ProcessGroup, spec: GroupSpec, members: Sequence[RendezvousMember]) -> None:
    """Write one line about a group that was just made.

    Args:
        group: The group.
        spec: Its arguments.
        members: The world's, by global rank; empty if they are not known.
    """
    call_log.watch()
    if not logs.reports(_log, group.rank()):
        return
    why = f" ({spec.why})" if spec.why else ""
    limit = spec.timeout.total_seconds()
    parts = [
        f"backend {group.backend_config}{why}",
        f"timeout {limit:g} s",
        *([group.details] if group.details else []),
    ]
    logs.decided(
        _log,
        group.rank(),
        "group %s: %s; %s",
        repr(spec.name) if spec.desc in _PLAIN else f"{spec.name!r} ({spec.desc})",
        _places(spec.global_ranks, members),
        "; ".join(parts),
    )


def _places(ranks: Sequence[int], members: Sequence[RendezvousMember]) -> str:
    """Return the number of ranks and their hosts as text; ranks are global ones."""
    count = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
    if not members:
        return f"{count} ({_numbers(ranks)})"
    hosts: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        hosts.setdefault((members[rank].host_id, members[rank].host), []).append(rank)
    where = "; ".join(f"{name}: {_numbers(own)}" for (_, name), own in hosts.items())
    return f"{count} on {len(hosts)} host{'s' if len(hosts) > 1 else ''} ({where})"


def _numbers(ranks: Sequence[int]) -> str:
    """Write ranks as text: 0-3 for a run of them."""
    ordered = list(ranks)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(map(str, ordered))}"


@logs.never_fails
def report_host(found: Rendezvous) -> None:
    """Write one line about the memory and cores of this host, once per process.

    It is written at INFO by the first rank of each host.
    """
    if os.getpid() in _reported or not _log.isEnabledFor(logging.INFO):
        return
    here = found.members[found.rank].host_id
    place = sum(member.host_id == here for member in found.members[: found.rank])
    if not logs.reports(_log, place):
        return
    _reported.add(os.getpid())
    parts = [*_memory(), _heap(), _huge_pages(), limits_of_heap()]
    quota = cpu_quota()
    cores = f"{len(os.sched_getaffinity(0))} hardware threads usable"
    cores += "" if quota == float("inf") else f", time of {quota:.3g} of them"
    text = "; ".join(part.rstrip(".") for part in (*parts, cores) if part)
    logs.decided(_log, place, "host %s: %s", os.uname().nodename, text)


def _memory() -> list[str]:
    lines = (line.split() for line in kernel_text(Path("/proc/meminfo")).splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if words[1:2]}
    found = [
        f"{logs.size_text(kib[name] << 10)} of memory {what}"
        for name, what in (("MemTotal", "in total"), ("MemAvailable", "available"))
        if name in kib
    ]
    limits = [
        kernel_text(group / name)
        for group in control_groups(Path("/"), "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    numbers = [int(text) for text in limits if text.isdecimal() and int(text) < 1 << 60]
    least = f"limited to {logs.size_text(min(numbers))}" if numbers else "not limited"
    return [", ".join(found), f"{least} by control groups"]


def _heap() -> str:
    if not native.available()[0]:
        return ""
    try:
        length = os.fstat(native.heap_identity()[2]).st_size
    except OSError:  # no heap can be made
        return ""
    return f"each rank's symmetric heap has up to {logs.size_text(length)}"


def _huge_pages() -> str:
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    texts = [kernel_text(folder / name) for name in ("enabled", "shmem_enabled")]
    private, shared = (t.partition("[")[2].partition("]")[0] or "unknown" for t in texts)
    return f"huge pages: {private} for private memory, {shared} for shared memory"
