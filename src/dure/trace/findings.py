"""Comparison of the flight records of all ranks of a job.

The collectives of a group have the same numbers on all ranks, so they are compared by number:

* *differences*: the first number at which ranks called different things (operation, dtype, root,
  reduction, or size if sizes must be equal);
* *absences*: a rank that has not made a call that others have made; its last call, and its current
  place in the program;
* *waits*: a rank whose last operation is a message that its peer has not matched;
* *arrivals*: how often each rank arrived last, and how long the first rank waited.

A ring drops old records, so a number before a rank's oldest record is no absence. Only the first
difference of a group is reported; later ones mostly follow from it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dure.trace.events import State
from dure.trace.merging import Flight, StackFrame
from dure.trace.record import Record, describe

__all__ = [
    "Absence",
    "Arrivals",
    "Difference",
    "FlightFindings",
    "GroupView",
    "Wait",
    "describe",
    "study",
]

_MOST_LISTED = 8
"""How many ranks, runs of ranks, or calls a sentence lists."""
_WAITED = frozenset({"CommTimeout", "PeerLost"})
_EQUAL_SIZES = frozenset(
    {"all_reduce", "reduce", "broadcast", "all_gather_single", "reduce_scatter_single"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """The collectives of one group: the global ranks of its members, and records by number."""

    name: str
    members: tuple[int, ...]
    calls: dict[int, dict[int, Record]]
    """Records by number, for each member that has a file."""

    @property
    def numbers(self) -> list[int]:
        """Every number for which some member has a record."""
        return sorted({seq for calls in self.calls.values() for seq in calls})

    def last(self, rank: int) -> int:
        """Return the number of a member's last recorded call; 0 if it has none."""
        return max(self.calls.get(rank, {}), default=0)

    def at(self, seq: int) -> dict[int, Record]:
        """Return each member's call with a number."""
        return {rank: calls[seq] for rank, calls in self.calls.items() if seq in calls}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first number at which the members of a group made different calls."""

    group: str
    seq: int
    what: tuple[str, ...]
    calls: dict[int, Record]

    def __str__(self) -> str:
        texts = {
            rank: f"called {describe(call)}" + (f" at {call.site}" if call.site else "")
            for rank, call in self.calls.items()
        }
        if len(texts) <= _MOST_LISTED:
            parts = [f"rank {rank} {text}" for rank, text in texts.items()]
        else:
            by_text: dict[str, list[int]] = {}
            for rank, text in texts.items():
                by_text.setdefault(text, []).append(rank)
            parts = [f"{_ranks(ranks)} {text}" for text, ranks in by_text.items()]
            if len(parts) > _MOST_LISTED:
                parts[_MOST_LISTED:] = [f"and {len(parts) - _MOST_LISTED} other calls"]
        calls = "; ".join(parts)
        what = " and ".join(self.what)
        return f"the ranks differ in the {what} of #{self.seq} of group {self.group!r}: {calls}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A member that has not made a call that other members have made.

    Attributes:
        group: The group.
        rank: The member's global rank.
        missed: The first of the other members' calls.
        called_by: Global ranks of the members that made the call.
        last: The member's last call in any group.
        before_s: Seconds from `last` to `missed`; negative if `last` is later.
        now: The frame of the member's main thread when it wrote its file.
        has_file: Whether the member wrote a file.
        failure: The exception that ended its program, if its file has one.
    """

    group: str
    rank: int
    missed: Record
    called_by: tuple[int, ...]
    last: Record | None = None
    before_s: float = 0.0
    now: StackFrame | None = None
    has_file: bool = True
    failure: str = ""

    def __str__(self) -> str:
        who = _ranks(self.called_by)
        missed = f"{self.missed.op} #{self.missed.seq} of group {self.group!r}"
        if not self.has_file:
            return (
                f"rank {self.rank} left no file, and {who} called {missed}: it was killed, or "
                "failed outside of an operation (its output says how), or still runs (`kill -USR2` "
                "would make it write one)"
            )
        text = f"rank {self.rank} never called {missed} ({who} did)"
        if self.last is None:
            text += "; it called nothing"
        else:
            when = "earlier" if self.before_s >= 0 else "later"
            site = f" at {self.last.site}" if self.last.site else ""
            still = " (still in it)" if self.last.state is State.STARTED else ""
            text += f"; its last call was {describe(self.last)}{site}"
            text += f" {abs(self.before_s):.3g} s {when}{still}"
        if self.failure:
            return f"{text}; it had failed: {self.failure}"
        return text + (f"; it is now at {self.now}" if self.now else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A rank that waits for its peer in a message, or waited until a timeout or the peer's end.

    Attributes:
        rank: Global rank of the waiting rank.
        peer: Global rank of its peer.
        call: The message.
        mutual: Whether the peer waits for this rank, directly or through others: a deadlock.
    """

    rank: int
    peer: int
    call: Record
    mutual: bool = False

    def __str__(self) -> str:
        site = f" at {self.call.site}" if self.call.site else ""
        text = f"rank {self.rank} waits for rank {self.peer} in {describe(self.call)}{site}"
        return f"{text}, and rank {self.peer} in the end for it" if self.mutual else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When a member arrives at the collectives that all members with a file have recorded.

    Attributes:
        group: The group.
        rank: The member's global rank.
        num_calls: Number of these collectives.
        num_last: How often the member arrived last.
        mean_late_s: Mean seconds after the first rank to arrive.
        max_late_s: The most seconds after the first rank to arrive.
        worst: The call with `max_late_s`.
    """

    group: str
    rank: int
    num_calls: int
    num_last: int
    mean_late_s: float
    max_late_s: float
    worst: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightFindings:
    """The result of `study`."""

    groups: tuple[GroupView, ...]
    differences: tuple[Difference, ...]
    absences: tuple[Absence, ...]
    arrivals: tuple[Arrivals, ...]
    failures: tuple[Record, ...]
    """The first failed operation of each rank."""
    waits: tuple[Wait, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """Differences, absences and waits, as sentences."""
        return [*map(str, self.differences), *map(str, self.absences), *map(str, self.waits)]


def study(flight: Flight) -> FlightFindings:
    """Compare the ranks' records."""
    groups = _groups(flight)
    differences = [d for g in groups if (d := _first_difference(g)) is not None]
    failed = ([r for r in f.records if r.state is State.FAILED] for f in flight.ranks.values())
    return FlightFindings(
        groups=groups,
        differences=tuple(differences),
        absences=tuple(a for g in groups for a in _absences(flight, g)),
        arrivals=tuple(a for g in groups for a in _arrivals(flight, g)),
        failures=tuple(records[0] for records in failed if records),
        waits=_waits(flight),
    )


def _waits(flight: Flight) -> tuple[Wait, ...]:
    """Return each rank's last message, if it has not ended and the rank called nothing after it."""
    found: dict[int, Wait] = {}
    for rank, file in flight.ranks.items():
        members = {group.name: group.ranks for group in file.groups}
        for call in file.records:
            ended = call.state is not State.STARTED and call.error not in _WAITED
            peers = members.get(call.group, ())
            if ended and not call.async_op:
                found.pop(rank, None)
            elif call.is_message and not ended and 0 <= (call.peer or 0) < len(peers):
                found[rank] = Wait(rank=rank, peer=peers[call.peer or 0], call=call)
    cycles = _in_cycles(found)
    return tuple(replace(wait, mutual=rank in cycles) for rank, wait in found.items())


def _in_cycles(waits: dict[int, Wait]) -> set[int]:
    """Return the ranks that wait for themselves through a chain of waiting ranks."""
    found, seen = set[int](), set[int]()
    for start in waits:
        at, path = start, dict[int, int]()  # its ranks, with their positions
        while at in waits and at not in seen:
            seen.add(at)
            path[at] = len(path)
            at = waits[at].peer
        if at in path:
            found.update(list(path)[path[at] :])
    return found


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0, 1" or, of many, "ranks 0-511, 513-1023"."""
    if len(ranks) <= _MOST_LISTED:
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [f"{first}-{last}" if last > first else str(first) for first, last in runs]
    more = sum(last - first + 1 for first, last in runs[_MOST_LISTED:])
    return f"ranks {', '.join(shown[:_MOST_LISTED])}{f' and {more} more' if more else ''}"


def _groups(flight: Flight) -> tuple[GroupView, ...]:
    members: dict[str, tuple[int, ...]] = {}
    calls: dict[tuple[int, str], dict[int, Record]] = {}
    for rank, file in flight.ranks.items():
        for group in file.groups:
            members.setdefault(group.name, group.ranks)
        for call in file.records:
            if not call.is_message and call.seq > 0:
                calls.setdefault((rank, call.group), {})[call.seq] = call
    return tuple(
        GroupView(
            name=name,
            members=ranks,
            calls={r: calls.get((r, name), {}) for r in ranks if r in flight.ranks},
        )
        for name, ranks in members.items()
    )


def _first_difference(group: GroupView) -> Difference | None:
    for seq in group.numbers:
        calls = group.at(seq)
        what = _differing(list(calls.values()))
        if what:
            return Difference(group=group.name, seq=seq, what=what, calls=calls)
    return None


def _differing(calls: Sequence[Record]) -> tuple[str, ...]:
    """Return the names of the properties in which calls with one number differ."""
    # The forms of an operation match each other: a list of tensors here, one tensor there.
    if _differ(c.op.removesuffix("_single") for c in calls):
        return ("operation",)
    sized = all(c.op in _EQUAL_SIZES for c in calls) or any(c.error == "Desync" for c in calls)
    found = {
        "dtype": _differ(c.dtype for c in calls),
        "size": sized and _differ(c.nbytes for c in calls),
        "root": _differ(c.peer for c in calls),
        "reduction": _differ(c.reduction for c in calls),
    }
    return tuple(name for name, differs in found.items() if differs)


def _differ(values: Iterable[object]) -> bool:
    return len(set(values)) > 1


def _absences(flight: Flight, group: GroupView) -> list[Absence]:
    found: list[Absence] = []
    numbers = group.numbers
    missed: dict[int, tuple[Record, tuple[int, ...]]] = {}  # the first call and the callers
    for rank in group.members:
        later = bisect_right(numbers, group.last(rank))
        if rank not in flight.ranks:  # its calls are unknown: show the others' last call
            later = len(numbers) - 1
        if not 0 <= later < len(numbers):
            continue
        if later not in missed:
            others = group.at(numbers[later])
            first = min(others, key=lambda r: flight.time_ns(r, others[r].start_ns))
            missed[later] = others[first], tuple(others)
        call, called_by = missed[later]
        absence = Absence(
            group=group.name,
            rank=rank,
            missed=call,
            called_by=called_by,
            has_file=rank in flight.ranks,
        )
        found.append(_with_history(flight, absence) if absence.has_file else absence)
    return found


def _with_history(flight: Flight, absence: Absence) -> Absence:
    file, rank = flight.ranks[absence.rank], absence.rank
    last = file.records[-1] if file.records else None
    before_s = 0.0
    if last is not None:
        missed_ns = flight.time_ns(absence.missed.global_rank, absence.missed.start_ns)
        before_s = (missed_ns - flight.time_ns(rank, last.start_ns)) / 1e9
    return replace(absence, last=last, before_s=before_s, now=file.where, failure=file.failure)


def _arrivals(flight: Flight, group: GroupView) -> list[Arrivals]:
    late: dict[int, list[tuple[float, Record]]] = {r: [] for r in group.members}
    num_last = dict.fromkeys(group.members, 0)
    for seq in group.numbers:
        calls = group.at(seq)
        if len(calls) < max(2, len(group.calls)):
            continue
        starts = {r: flight.time_ns(r, c.start_ns) for r, c in calls.items()}
        first = min(starts.values())
        num_last[max(starts, key=starts.__getitem__)] += 1
        for r, start in starts.items():
            late[r].append(((start - first) / 1e9, calls[r]))
    found: list[Arrivals] = []
    for rank, delays in late.items():
        if not delays:
            continue
        worst_s, worst = max(delays, key=lambda d: d[0])
        found.append(
            Arrivals(
                group=group.name,
                rank=rank,
                num_calls=len(delays),
                num_last=num_last[rank],
                mean_late_s=sum(s for s, _ in delays) / len(delays),
                max_late_s=worst_s,
                worst=worst,
            )
        )
    return found
