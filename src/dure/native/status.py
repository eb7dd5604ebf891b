"""Conversion of a native status to an exception."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypedDict

from dure.errors import (
    Aborted,
    CommError,
    CommTimeout,
    Desync,
    DureError,
    InternalError,
    PeerLost,
    UsageError,
)

if TYPE_CHECKING:
    from dure.native._engine import Outcome

__all__ = ["Status", "error_of"]


class _Fields(TypedDict):
    """The fields of every error."""

    group: str
    op: str | None
    seq: int | None
    rank: int
    world_size: int
    peer: int | None


class Status(IntEnum):
    """How a native operation ended; the numbers are those of csrc/core/types.h."""

    OK = 0
    """It succeeded."""
    TIMEOUT = 1
    """Peers did not arrive in time; the group is broken."""
    PEER_LOST = 2
    """A peer's process died."""
    PEER_LEFT = 3
    """A peer closed its group."""
    DESYNC = 4
    """The ranks did not make the same call."""
    ABORTED = 5
    """This rank closed the group during the operation."""
    INTERRUPTED = 6
    """A signal handler raised on some rank."""
    MISMATCH = 7
    """A message of another length or dtype than its receive; the group is not broken."""
    LATE = 8
    """A point-to-point peer did not answer in time; the group is not broken."""
    USAGE = 9
    """Invalid arguments."""
    NO_MEMORY = 10
    """Some rank could not allocate memory."""
    INTERNAL = 11
    """A bug of Dure."""
    FORKED = 12
    """Called in a child of the process that made the group."""
    NESTED = 13
    """A signal handler called a collective during another."""
    OUTSIDE = 14
    """The code that uses the group broke it, for the reason in `detail`."""
    CROSSED = 15
    """Two threads of a rank called on one channel at the same time; the group is broken."""


_ERROR_NAMES: dict[Status, str] = {
    Status.TIMEOUT: "CommTimeout",
    Status.LATE: "CommTimeout",
    Status.PEER_LOST: "PeerLost",
    Status.PEER_LEFT: "PeerLost",
    Status.INTERRUPTED: "PeerLost",
    Status.DESYNC: "Desync",
    Status.MISMATCH: "Desync",
    Status.CROSSED: "Desync",
    Status.ABORTED: "Aborted",
    Status.NO_MEMORY: "CommError",
    Status.INTERNAL: "InternalError",
}


def error_name(status: int) -> str:
    """Return the name of the type of `error_of` for a status."""
    return _ERROR_NAMES.get(Status(status), "UsageError")


ONE_THREAD_FIX = (
    "Give each thread a group of its own (dure.new_group), or let one thread wait for the other."
)


def _usage_fix(detail: str) -> str:
    """Return the `fix` for a call that the engine refused."""
    if detail.startswith("two threads"):
        return ONE_THREAD_FIX
    return "Give it memory first; its storage was resized to 0." if detail else ""


def error_of(
    outcome: Outcome, *, group: str, rank: int, size: int, pid: int, timeout_s: float
) -> DureError:
    """Make the exception for a failed native operation.

    Args:
        outcome: The engine's outcome.
        group: Name of the group.
        rank: This rank.
        size: Number of ranks of the group.
        pid: Process id of the peer that caused the failure; 0 if there is none.
        timeout_s: The group's timeout.
    """
    peer = outcome.peer if outcome.peer >= 0 else None
    fields: _Fields = {
        "group": group,
        "op": outcome.op if outcome.op != "none" else None,
        "seq": outcome.seq or None,
        "rank": rank,
        "world_size": size,
        "peer": peer,
    }
    noticed = "" if outcome.reporter in (-1, rank) else f", as rank {outcome.reporter} noticed"
    match Status(outcome.status):
        case Status.TIMEOUT | Status.LATE:
            return _timeout(outcome, noticed, timeout_s, fields)
        case Status.PEER_LOST | Status.PEER_LEFT | Status.INTERRUPTED as status:
            return _peer_lost(outcome, status, noticed, pid, fields)
        case Status.DESYNC:
            return _desync(outcome, fields)
        case Status.MISMATCH:
            return Desync(
                "a message does not match its receive",
                calls={rank: outcome.calls[0], outcome.peer: outcome.calls[1]},
                seen=f"{outcome.calls[0]} here, {outcome.calls[1]} on rank {outcome.peer}",
                fix="Receive into a tensor of the length and dtype that are sent; "
                "the message is kept for a receive that fits.",
                **fields,
            )
        case Status.ABORTED:
            return Aborted(
                "the group was destroyed while the operation was pending, or before it",
                **fields,
            )
        case Status.NO_MEMORY:
            return CommError(
                "a rank could not allocate shared memory",
                fix="Free memory, or raise the limit of the container.",
                **fields,
            )
        case Status.USAGE:
            return UsageError(
                outcome.detail or "the engine cannot do this operation on this dtype",
                fix=_usage_fix(outcome.detail),
                **fields,
            )
        case Status.FORKED:
            return left_behind(**fields)
        case Status.NESTED:
            return UsageError(
                "a signal handler called a collective while another one was waiting",
                fix="Let the handler set a flag, or raise, and act on it after the call.",
                **fields,
            )
        case Status.CROSSED:
            return crossed(outcome.detail, outcome.peer, {**fields})
        case Status.OUTSIDE:
            return CommError("the group was broken", seen=outcome.detail, **fields)
        case status:
            return InternalError(
                f"the engine reported {status.name}",
                seen=outcome.detail,
                **fields,
            )


def left_behind(**where: Any) -> UsageError:
    """Make the error of a call in a child that was forked since, without the group's threads."""
    return UsageError(
        "the group belongs to the process that this one was forked from",
        fix="Call from the rank's own process, or make a group in the child.",
        **where,
    )


def crossed(seen: str, culprit: int, fields: Mapping[str, Any]) -> Desync:
    """Return the error of a group that a second thread of rank `culprit` broke."""
    return Desync(
        f"a call of rank {culprit} was refused, so the calls that follow may not match",
        seen=seen,
        fix=ONE_THREAD_FIX,
        **fields,
    )


def _timeout(outcome: Outcome, noticed: str, timeout_s: float, fields: _Fields) -> CommTimeout:
    ranks = ", ".join(map(str, outcome.missing)) or "any"
    plural = "s" if len(outcome.missing) > 1 else ""
    places = zip(outcome.missing, outcome.calls, strict=False)
    whereabouts = {rank: text for rank, text in places if text}
    places_text = "".join(f"; rank {rank}: {text}" for rank, text in whereabouts.items())
    return CommTimeout(
        f"rank{plural} {ranks} did not arrive{noticed}",
        missing=tuple(outcome.missing),
        whereabouts=whereabouts,
        elapsed_s=timeout_s,
        seen=f"the timeout of {timeout_s:g} s passed{places_text}",
        fix="See what keeps that rank, or give the group a longer timeout.",
        **fields,
    )


def _peer_lost(
    outcome: Outcome, status: Status, noticed: str, pid: int, fields: _Fields
) -> PeerLost:
    text = {
        Status.PEER_LOST: f"the process of rank {outcome.peer} ended",
        Status.PEER_LEFT: f"rank {outcome.peer} left the group",
        Status.INTERRUPTED: f"rank {outcome.peer} was interrupted",
    }[status]
    if outcome.peer < 0:
        text = (
            "all peers left the group" if status is Status.PEER_LEFT else "a peer's process ended"
        )
    fix = "See that rank's own output; dure.shrink() makes a group of the ranks that are left."
    if status is Status.PEER_LEFT:
        it, its = ("They", "their") if outcome.peer < 0 else ("It", "its")
        fix = (
            f"{it} ended, or destroyed {its} groups, without this call: make all ranks call the "
            "same operations. "
            "dure.shrink() makes a group of the ranks that are left."
        )
    seen = [f"pid {pid}"] if pid else []
    if status is Status.PEER_LOST and outcome.detail:
        seen.append(outcome.detail)
    return PeerLost(
        text + noticed,
        pid=pid or None,
        host=platform.node(),
        exit=outcome.detail or None if status is Status.PEER_LOST else None,
        seen=", ".join(seen),
        fix=fix,
        **fields,
    )


def _desync(outcome: Outcome, fields: _Fields) -> Desync:
    calls = dict(enumerate(outcome.calls))
    # The outcome's own operation is that of the rank that noticed first.
    fields["op"] = calls.get(fields["rank"], "").partition("(")[0] or fields["op"]
    return Desync(
        "the ranks did not call the same thing",
        calls=calls,
        seen="; ".join(f"rank {r}: {call}" for r, call in calls.items()),
        fix="No data were changed. Make all ranks call the same operations in the same order.",
        **fields,
    )
