"""Lines of the log about groups that were made."""

from __future__ import annotations

from collections.abc import Sequence

from dure.comm.group import GroupSpec, ProcessGroup
from dure.store.members import RendezvousMember
from dure.trace import logs

__all__ = ["report_group"]

_log = logs.logger("comm")
_PLAIN = ("", "default_pg")


@logs.never_fails
def report_group(group: ProcessGroup, spec: GroupSpec, members: Sequence[RendezvousMember]) -> None:
    """Write one line about a group that was just made.

    Args:
        group: The group.
        spec: Its arguments.
        members: The world's, by global rank; empty if they are not known.
    """
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
