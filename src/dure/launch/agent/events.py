"""Events, which agents report to the job's state, and actions, which it wants of them.

An *event* is what happens to a job, as an agent reports it. An *action* is what the state wants of
one agent now. Both are small values with a fixed shape, packed with msgpack and read back with
every field checked; nothing is unpickled.

An event may be applied more than once: an agent that does not know whether its message has arrived
sends it again. So an event names the round, timer or process that it is about, and means nothing
when that is over. Times are not part of it: an agent whose timer runs out reports that (`Expired`),
so no agent needs another one's clock.

An action holds what one agent needs and no more, so that its size does not depend on the number of
hosts: an agent learns its own part of a round (`Round`), and only node 0, which shows them, the
results of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dure.launch.ranks.environment import Round
from dure.launch.spec import RankResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a job, which its first agent makes for all.

    Args:
        min_hosts: Fewer hosts do not start a round.
        max_hosts: Further hosts are spares.
        max_restarts: How many failures the job survives.
        join_timeout_s: How long to wait for `min_hosts`.
        last_call_s: How long the first round then waits for more.
        min_ranks: An elastic job with fewer living ranks ends.
        endpoint: Where hosts join, for messages.
        run_id: The job's name.
        store: The ranks' store: HOST:PORT, or etcd's URL.
        job_key: The key of that store.
        restart_delay_s: The longest pause before a restart.
        lease_s: How long an agent may go without a renewal.
        margin_s: How much longer the others wait for it.
    """

    min_hosts: int = 1
    max_hosts: int = 1
    max_restarts: int = 0
    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    min_ranks: int = 1
    endpoint: str = ""
    run_id: str = ""
    store: str = ""
    job_key: bytes = field(default=b"", repr=False)
    restart_delay_s: float = 0.0
    lease_s: float = 15.0
    margin_s: float = 2.0


# --- events -------------------------------------------------------------------------------------


class Joined(msgspec.Struct, array_like=True, frozen=True, tag="joined"):
    """An agent came, with `nproc` ranks on the host named `host`, which others reach at `address`.

    `node_rank` is the node's number if the user fixed it; `port` is kept there for rank 0.
    """

    agent: str
    host: str
    nproc: int
    node_rank: int | None = None
    address: str = ""
    port: int = 0


class Left(msgspec.Struct, array_like=True, frozen=True, tag="left"):
    """An agent leaves: because of a signal (128 + its number), or an error (1).

    `ends_job`: it coordinates, so the job cannot continue.
    """

    agent: str
    code: int
    why: str = ""
    ends_job: bool = False


class Lost(msgspec.Struct, array_like=True, frozen=True, tag="lost"):
    """An agent's lease is gone: its ranks are dead, or its host can have none any more."""

    agent: str
    why: str = ""


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """A worker failed; `times` others were started in its place before.

    `early`: it failed so soon after the round's start that the next round may fail as well.
    """

    agent: str
    round: int
    local_rank: int
    worker: RankResult
    times: int = 0
    early: bool = False


class Finished(msgspec.Struct, array_like=True, frozen=True, tag="finished"):
    """One worker of an elastic job ended well."""

    agent: str
    round: int
    local_rank: int


class Ended(msgspec.Struct, array_like=True, frozen=True, tag="ended"):
    """Nothing of a round is left on an agent's host; `ranks` are the results of its workers.

    `well`: all of them had succeeded before the round was stopped.
    """

    agent: str
    round: int
    ranks: tuple[RankResult, ...] = ()
    well: bool = False


class Expired(msgspec.Struct, array_like=True, frozen=True, tag="expired"):
    """A timer of the state has run out."""

    timer: str


OfRound = Failed | Finished | Ended
Event = Joined | Left | Lost | Expired | OfRound


# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One round: which hosts take part, in the order of their nodes; the first has number 0."""

    number: int
    joined: tuple[Joined, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """The agents."""
        return tuple(each.agent for each in self.joined)

    def owner(self, rank: int) -> Joined | None:
        """Return the member that starts a rank."""
        for each in self.joined:
            if rank < each.nproc:
                return each
            rank -= each.nproc
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How the job ended: the exit code of every agent, and the reason.

    Attributes:
        code: The exit code.
        why: The line that the launcher prints, if no worker's failure was the reason.
        failure: The worker that failed first, or the one that it blames.
        ranks: The last known results of all workers of the last round.
        limit: Which of the user's limits the job has reached, if it failed by one.
    """

    code: int
    why: str = ""
    failure: RankResult | None = None
    ranks: tuple[RankResult, ...] = ()
    limit: str = ""


class Idle(msgspec.Struct, array_like=True, frozen=True, tag="wait"):
    """Do nothing.

    Attributes:
        timer: Report `Expired(timer)` if the action is still the same after so many seconds.
        after_s: How many; 0 if there is no timer.
        line: A line for users about the reason.
        quiet_s: After how many seconds to show that.
    """

    timer: str = ""
    after_s: float = 0.0
    line: str = ""
    quiet_s: float = 0.0


class Replacement(msgspec.Struct, array_like=True, frozen=True):
    """A worker that is due in place of one that ended.

    Attributes:
        local_rank: Its place.
        times: How many were started there before it, and so its number.
        restart: How many of the job's restarts are used with it.
    """

    local_rank: int
    times: int
    restart: int


class RunRound(msgspec.Struct, array_like=True, frozen=True, tag="work"):
    """Run the workers of this round, start the replacements that are due, and show the notes.

    Attributes:
        round: The host's part in it.
        setback: Why the last round ended.
        restarts: How many restarts are used.
        delay_s: How long the job paused before this one.
        replaced: The replacements.
        notes: Lines about other hosts, each with a name of its own, by which it is shown once.
    """

    round: Round
    setback: str = ""
    restarts: int = 0
    delay_s: float = 0.0
    replaced: tuple[Replacement, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()


class Stop(msgspec.Struct, array_like=True, frozen=True, tag="stop"):
    """End the workers of this round, and report `Ended` when none of them is left.

    `failed`: a worker failed, so ask the others where they are. `departing`: a host leaves in
    order, so there is time to save.
    """

    round: int
    failed: bool = False
    departing: bool = False


class Rejoin(msgspec.Struct, array_like=True, frozen=True, tag="rejoin"):
    """The job has given this agent up: end what runs, and join under another name."""


class Leave(msgspec.Struct, array_like=True, frozen=True, tag="leave"):
    """End, with this outcome."""

    outcome: JobOutcome


Action = Idle | RunRound | Stop | Rejoin | Leave
