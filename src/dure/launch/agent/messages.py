"""What an agent and the job's state send each other: joining, two requests, and leaving.

    request        meaning                                     answers
    -------        -------                                     -------
    JoinRequest    become a member, under a new name           Admitted, NoJob, Gone, Refusal
    Heartbeat      the agent lives; its events, if any         Accepted, Gone
    WatchRequest   wait until the action is another one        View, Accepted (not yet), Gone
    LeaveRequest   be no member any more                       Accepted, Gone

Every message may arrive late, twice, or not at all, and each but the first names the member by a
number that only it knows (`nonce`): a message of one that was given up changes nothing.

A `Control` carries requests to the state, wherever that is: in the coordinator's launcher
(`coordinator`) or in etcd (`etcd`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import msgspec

from dure.errors import UsageError
from dure.launch.agent.elastic import ElasticState
from dure.launch.agent.events import Action, Event, Joined, Settings
from dure.launch.agent.state import JobState
from dure.store.builds import SAME_BUILD


class Control(Protocol):
    """The way to the job's state.

    Threads:
        One watches, another one asks all else.

    Raises:
        StoreLost: The state is gone, or cannot be reached any more.
        StoreTimeout: No answer came in time; the request may have been carried out or not.
    """

    def ask(self, message: Message, timeout_s: float = 0.0) -> Answer:
        """Put a request; a `WatchRequest` may take `timeout_s`."""
        ...

    def has_ended(self) -> bool:
        """Whether the process that holds the state is known to have ended; False means nothing."""
        ...

    def close(self) -> None:
        """End all calls, also of other threads."""
        ...


# --- requests -------------------------------------------------------------------------------------


class JoinRequest(msgspec.Struct, array_like=True, frozen=True, tag="join"):
    """An agent wants to be a member.

    Attributes:
        joined: Its host.
        nonce: Known to it alone.
        settings: As its user set them; without a name, the job may have any.
        elastic: Whether the job is elastic.
        former: Its name as a member of this job before, of which nothing is left on its host.
    """

    joined: Joined
    nonce: bytes
    settings: Settings
    elastic: bool
    former: str = ""

    def state(self, run_id: str) -> JobState:
        """Return the state of a job of this name that begins with these settings."""
        kind = ElasticState if self.elastic else JobState
        return kind(replace(self.settings, run_id=run_id))


class Heartbeat(msgspec.Struct, array_like=True, frozen=True, tag="heartbeat"):
    """The agent lives, and reports these events, in their order."""

    agent: str
    nonce: bytes
    events: tuple[Event, ...] = ()


class WatchRequest(msgspec.Struct, array_like=True, frozen=True, tag="watch"):
    """Wait for another view than the one with revision `seen`."""

    agent: str
    nonce: bytes
    seen: int = 0


class LeaveRequest(msgspec.Struct, array_like=True, frozen=True, tag="leave"):
    """The agent's part is over: nothing of the job is left on its host, because `why`."""

    agent: str
    nonce: bytes
    why: str = "its launcher has ended"


Message = JoinRequest | Heartbeat | WatchRequest | LeaveRequest


# --- answers --------------------------------------------------------------------------------------


class Admitted(msgspec.Struct, array_like=True, frozen=True, tag="admitted"):
    """The agent is a member of a job with these settings."""

    settings: Settings


class NoJob(msgspec.Struct, array_like=True, frozen=True, tag="none"):
    """There is no job here that can be joined, or not yet."""


class Refusal(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """The agent can never join; `seen` names the flags that differ."""

    seen: str

    def error(self) -> UsageError:
        """Return the error."""
        return UsageError(
            "this host was started with other flags than the first",
            seen=self.seen,
            fix="Start `dure run` with the same flags on every host, or use another endpoint for "
            "another job.",
        )


class View(msgspec.Struct, array_like=True, frozen=True, tag="view"):
    """What a member has to do now; each action has another revision."""

    revision: int
    action: Action


class Accepted(msgspec.Struct, array_like=True, frozen=True, tag="ok"):
    """Done."""


class Gone(msgspec.Struct, array_like=True, frozen=True, tag="gone"):
    """The agent is no member (any more)."""


Answer = Admitted | NoJob | Refusal | View | Accepted | Gone

pack = msgspec.msgpack.Encoder().encode
read_message = msgspec.msgpack.Decoder(Message).decode
read_answer = msgspec.msgpack.Decoder(Answer).decode


# --- reasons not to be admitted -------------------------------------------------------------------


def other_build(seen: str) -> UsageError:
    """Return the error for a host whose build of Dure is not the job's; `seen` names both."""
    return UsageError(
        "the job at this endpoint runs with another build of Dure",
        seen=seen,
        fix=f"{SAME_BUILD} Or use another endpoint for another job.",
    )


def why_other_flags(joining: JoinRequest, state: JobState) -> Refusal | None:
    """Refuse a host that was started with other flags than the first; None: they are the same."""
    here = _flags(joining.settings, joining.elastic)
    there = _flags(state.settings, isinstance(state, ElasticState))
    if not joining.settings.run_id:
        here["--rdzv-id"] = there["--rdzv-id"]
    differ = [flag for flag in here if here[flag] != there[flag]]
    seen = "; ".join(f"{flag}: {there[flag]} there, {here[flag]} here" for flag in differ)
    return Refusal(seen) if differ else None


def _flags(settings: Settings, elastic: bool) -> dict[str, object]:
    """Return what must be the same on all hosts of a job."""
    return {
        "--nnodes": f"{settings.min_hosts}:{settings.max_hosts}",
        "--max-restarts": settings.max_restarts,
        "--elastic": elastic,
        "--min-ranks": settings.min_ranks,
        "--rdzv-id": settings.run_id,
    }
