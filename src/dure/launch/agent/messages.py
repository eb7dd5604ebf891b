"""What an agent and the job's state send each other: three requests, and joining and leaving.

    request   meaning                                     answers
    -------   -------                                     -------
    Join      become a member, under a new name           Admitted, NoJob, Refusal
    Tell      events of this agent                        Accepted, Gone
    Watch     wait until the action is another one        View, Accepted (not yet), Gone
    Renew     the lease continues                         Accepted, Gone
    Leave     be no member any more                       Accepted

Every message may arrive late, twice, or not at all, and each but the last names the member by a
number that only it knows (`nonce`): a message of one that was given up changes nothing.

A `Control` carries requests to the state, wherever that is: in the coordinator's launcher
(`coordinator`) or in etcd (`etcd`).
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Protocol

import msgspec

from dure.errors import UsageError
from dure.launch.agent.elastic import ElasticState
from dure.launch.agent.events import Action, Event, Joined, Settings
from dure.launch.agent.state import JobState
from dure.store.builds import SAME_BUILD, own_build
from dure.store.identity import host_name

__all__ = [
    "Accepted",
    "Admitted",
    "Answer",
    "Author",
    "Control",
    "Gone",
    "Join",
    "Joining",
    "Leave",
    "Message",
    "NoJob",
    "Refusal",
    "Renew",
    "Tell",
    "View",
    "Watch",
    "author",
    "join",
    "pack",
    "read_answer",
    "read_joining",
    "read_message",
    "why_other_build",
    "why_other_flags",
]


class Control(Protocol):
    """The way to the job's state.

    Threads: one watches, another one asks all else.

    Raises:
        StoreLost: The state is gone, or cannot be reached any more.
        StoreTimeout: No answer came in time; the request may have been carried out or not.
    """

    def ask(self, message: Message, timeout_s: float = 0.0) -> Answer:
        """Put a request; a `Watch` may take `timeout_s`."""
        ...

    def has_ended(self) -> bool:
        """Whether the process that holds the state is known to have ended; False means nothing."""
        ...

    def see_others_off(self, agent: str, limit_s: float) -> None:
        """At the end of the job: wait until the others have left, and clear what would stay.

        `agent` has left; if that is another one's task, return at once.
        """
        ...

    def close(self) -> None:
        """End all calls, also of other threads."""
        ...


# --- requests -------------------------------------------------------------------------------------


class Author(msgspec.Struct, array_like=True, frozen=True):
    """The build that wrote a message or a state. Every version reads it, so fields are appended.

    Attributes:
        build: Its text.
        host: Where it runs.
        source: A checksum of the files that define the messages: a checkout can be another one
            under the same version.
    """

    build: str
    host: str = "another host"
    source: str = ""

    def __str__(self) -> str:
        return f"{self.build} on {self.host}"


class Join(msgspec.Struct, array_like=True, frozen=True, tag="join"):
    """An agent wants to be a member; other builds read all but its body."""

    author: Author
    body: msgspec.Raw  # a `Joining`


class Joining(msgspec.Struct, array_like=True, frozen=True):
    """What an agent reports when it joins.

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


class Tell(msgspec.Struct, array_like=True, frozen=True, tag="tell"):
    """Events, in their order."""

    agent: str
    nonce: bytes
    events: tuple[Event, ...]


class Watch(msgspec.Struct, array_like=True, frozen=True, tag="watch"):
    """Wait for another view than the one with revision `seen`; `heard`: how many notes it had."""

    agent: str
    nonce: bytes
    seen: int = 0
    heard: int = 0


class Renew(msgspec.Struct, array_like=True, frozen=True, tag="renew"):
    """The agent lives."""

    agent: str
    nonce: bytes


class Leave(msgspec.Struct, array_like=True, frozen=True, tag="leave"):
    """The agent's part is over: nothing of the job is left on its host, because `why`."""

    agent: str
    nonce: bytes
    why: str = "its launcher has ended"


Message = Join | Tell | Watch | Renew | Leave


# --- answers --------------------------------------------------------------------------------------


class Admitted(msgspec.Struct, array_like=True, frozen=True, tag="admitted"):
    """The agent is a member of a job with these settings."""

    settings: Settings


class NoJob(msgspec.Struct, array_like=True, frozen=True, tag="none"):
    """There is no job here that can be joined, or not yet."""


class Refusal(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """The agent can never join: the fields of an error."""

    message: str
    seen: str
    fix: str

    def error(self) -> UsageError:
        """Return the error."""
        return UsageError(self.message, seen=self.seen, fix=self.fix)


class View(msgspec.Struct, array_like=True, frozen=True, tag="view"):
    """What a member has to know now.

    Attributes:
        revision: Another one for each action.
        action: What it has to do.
        notes: News of other hosts, for people, since the last view.
        heard: How many notes there were in all.
    """

    revision: int
    action: Action
    notes: tuple[str, ...] = ()
    heard: int = 0


class Accepted(msgspec.Struct, array_like=True, frozen=True, tag="ok"):
    """Done; `missing`: how many hosts must still come before a round can start."""

    missing: int = 0


class Gone(msgspec.Struct, array_like=True, frozen=True, tag="gone"):
    """The agent is no member (any more)."""


Answer = Admitted | NoJob | Refusal | View | Accepted | Gone

pack = msgspec.msgpack.Encoder().encode
read_message = msgspec.msgpack.Decoder(Message).decode
read_answer = msgspec.msgpack.Decoder(Answer).decode
read_joining = msgspec.msgpack.Decoder(Joining).decode


# --- reasons not to be admitted -------------------------------------------------------------------


@cache
def author() -> Author:
    """Return this process as an author."""
    folder = Path(__file__).parent
    files = sorted([*folder.glob("*.py"), folder.parent / "spec.py"])
    source = b"".join(path.read_bytes() for path in files)
    return Author(str(own_build()), host_name(), f"{zlib.crc32(source):08x}")


def join(joining: Joining) -> Join:
    """Return the request to become a member."""
    return Join(author(), msgspec.Raw(pack(joining)))


def why_other_build(theirs: Author, mine: Author) -> Refusal:
    """Refuse to let builds meet that do not read each other's messages."""
    names = [f"{each}" for each in (theirs, mine)]
    if theirs.build == mine.build:  # a checkout that was changed, and has kept its version
        names = [f"{each}, with source files {each.source or 'unknown'}" for each in (theirs, mine)]
    return Refusal(
        "the job at this endpoint runs with another build of Dure",
        ", ".join(names),
        f"{SAME_BUILD} Or use another endpoint for another job.",
    )


def why_other_flags(joining: Joining, state: JobState) -> Refusal | None:
    """Refuse a host that was started with other flags than the first; None: they are the same."""
    here = _flags(joining.settings, joining.elastic)
    there = _flags(state.settings, isinstance(state, ElasticState))
    if not joining.settings.run_id:
        here["--rdzv-id"] = there["--rdzv-id"]
    differ = [flag for flag in here if here[flag] != there[flag]]
    if not differ:
        return None
    return Refusal(
        "this host was started with other flags than the first",
        "; ".join(f"{flag}: {there[flag]} there, {here[flag]} here" for flag in differ),
        "Start `dure run` with the same flags on every host, or use another endpoint for another "
        "job.",
    )


def _flags(settings: Settings, elastic: bool) -> dict[str, object]:
    """Return what must be the same on all hosts of a job."""
    return {
        "--nnodes": f"{settings.min_hosts}:{settings.max_hosts}",
        "--max-restarts": settings.max_restarts,
        "--elastic": elastic,
        "--min-ranks": settings.min_ranks,
        "--rdzv-id": settings.run_id,
    }
