"""What agents and the job's state say to each other: events in, actions out.

An *event* is what happens to a job, as an agent tells it. A *action* is what the state wants of one
agent now. Both are small values with a fixed shape, packed with msgpack and read back with every
field checked; nothing is unpickled.

An event may be applied more than once: who does not know whether his write has arrived writes
again. So an event says which round, timer or process it is about, and means nothing when that is
over. Times are not part of it: an agent whose clock runs out says so (`Expired`), so that nobody
needs the others' clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dure.launch.spec import RankResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The terms of a job, which its first agent sets for all.

    Args:
        min_hosts: Fewer make no round.
        max_hosts: More are spares.
        max_restarts: How many failures the job outlives.
        join_timeout_s: How long to wait for `min_hosts`.
        last_call_s: How long the first round then waits for more.
        exclude_after: How many rounds running a host may be the first to fail.
        min_ranks: An elastic job with fewer living ranks ends.
        endpoint: Where hosts join, for people.
        run_id: The job's name.
        store: The ranks' store: HOST:PORT, or etcd's URL.
        job_key: What opens that store.
        lease_s: How long an agent may go without a renewal.
        margin_s: How much longer the others wait for it.
    """

    min_hosts: int = 1
    max_hosts: int = 1
    max_restarts: int = 0
    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    exclude_after: int = 3
    min_ranks: int = 1
    endpoint: str = ""
    run_id: str = ""
    store: str = ""
    job_key: bytes = field(default=b"", repr=False)
    lease_s: float = 30.0
    margin_s: float = 2.0


# --- events -------------------------------------------------------------------------------------


class Joined(msgspec.Struct, array_like=True, frozen=True, tag="joined"):
    """An agent came, with `nproc` ranks on `host`, which others reach at `address`.

    `node_rank` is what its user fixed.
    """

    agent: str
    host: str
    nproc: int
    node_rank: int | None = None
    address: str = ""

    @property
    def machine(self) -> str:
        """Which machine that is, whatever agents it has had."""
        return f"{self.host} {self.address}".strip()


class Left(msgspec.Struct, array_like=True, frozen=True, tag="left"):
    """An agent takes its leave: it was told to (128 + signal), or cannot go on (1).

    `ends_job`: it coordinates, so nobody can go on.
    """

    agent: str
    code: int
    why: str = ""
    ends_job: bool = False


class Lost(msgspec.Struct, array_like=True, frozen=True, tag="lost"):
    """An agent's lease is gone: its ranks are dead, or its host can have none any more."""

    agent: str
    why: str = ""


class Missing(msgspec.Struct, array_like=True, frozen=True, tag="missing"):
    """An agent's connection broke in this round and has not been opened again; it may be back."""

    agent: str
    round: int


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """A host that the job waits for has another build of Dure; `builds` says which are where."""

    builds: str


class Ready(msgspec.Struct, array_like=True, frozen=True, tag="ready"):
    """The first agent of a round keeps a port for rank 0."""

    agent: str
    round: int
    master_addr: str
    master_port: int


class Failed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    """A worker failed, of which `times` were started in its place before; what is known of it."""

    agent: str
    round: int
    local_rank: int
    worker: RankResult
    times: int = 0


class Finished(msgspec.Struct, array_like=True, frozen=True, tag="finished"):
    """One worker of an elastic job ended well."""

    agent: str
    round: int
    local_rank: int


class Ended(msgspec.Struct, array_like=True, frozen=True, tag="ended"):
    """Nothing of a round is left on an agent's host; `ranks` tells what became of its workers.

    `well`: all of them had succeeded before anybody was told to stop.
    """

    agent: str
    round: int
    ranks: tuple[RankResult, ...] = ()
    well: bool = False


class Expired(msgspec.Struct, array_like=True, frozen=True, tag="expired"):
    """A time has passed which the state asked to be told of."""

    timer: str


OfRound = Failed | Finished | Ended | Missing
Event = Joined | Left | Lost | Refused | Ready | Expired | OfRound


# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """One round: who takes part, in the order of their nodes; the first round has number 0."""

    number: int
    joined: tuple[Joined, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """The agents."""
        return tuple(each.agent for each in self.joined)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Their hosts' names."""
        return tuple(each.host for each in self.joined)

    @property
    def nprocs(self) -> tuple[int, ...]:
        """How many ranks each of them starts."""
        return tuple(each.nproc for each in self.joined)

    def node_of(self, agent: str) -> int:
        """Return the node's number of an agent."""
        return self.members.index(agent)

    def owner(self, rank: int) -> Joined | None:
        """Return who starts a rank."""
        for each in self.joined:
            if rank < each.nproc:
                return each
            rank -= each.nproc
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the job ended: what every agent exits with, and why.

    Attributes:
        code: The exit code.
        why: What the launcher says of it, if it was no worker's failure.
        failure: The worker that failed first, or whom that one blames.
        ranks: What became of all workers of the last round, as far as they were told.
        limit: Which limit of the user's the job has come to, if it failed by one.
    """

    code: int
    why: str = ""
    failure: RankResult | None = None
    ranks: tuple[RankResult, ...] = ()
    limit: str = ""


@dataclass(frozen=True, slots=True)
class Timer:
    """Say `Expired(name)` if nothing has changed after so many seconds."""

    name: str
    after_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """There is nothing to do, but perhaps something to wait for."""

    timer: Timer | None = None


@dataclass(frozen=True, slots=True)
class Prepare:
    """Keep a port for rank 0 of this round, and say `Ready`."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Work:
    """Run the workers of this round; `replaced` counts, by local rank, the replacements due."""

    plan: Plan
    ready: Ready
    replaced: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """End the workers of this round, and say `Ended` when nothing of them is left."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Rejoin:
    """The others have given this agent up: end what runs, and join under another name."""


@dataclass(frozen=True, slots=True)
class Leave:
    """End, with this outcome."""

    outcome: Outcome


Action = Wait | Prepare | Work | Stop | Rejoin | Leave
