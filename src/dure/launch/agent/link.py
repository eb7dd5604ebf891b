"""What an agent sees of the job's other agents: nobody, or a membership that it takes up anew.

A job on one host has no lease and no deadline (`Alone`): its state is fed directly, without
threads or round trips. On several hosts (`Linked`) an agent finds the state (`finding`) and becomes
a member (`membership`); when it has been given up, it does both again under another name.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Protocol

import msgspec

from dure.errors import LaunchError, StoreError
from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import Event, Joined, Settings
from dure.launch.agent.finding import EtcdFinder, Finder, keep_quiet
from dure.launch.agent.machine import Machine, Phase
from dure.launch.agent.membership import LastWill, Member, Terms, boottime
from dure.launch.ranks.environment import MASTER_ADDR
from dure.launch.ranks.reaper import Reaper
from dure.launch.spec import JobSpec
from dure.store.address import resolve
from dure.store.key import JobKey, control_key, mint
from dure.store.listener import listen
from dure.store.server import StoreServer

__all__ = ["Alone", "Link", "Linked", "make_machine"]

_REJOIN_S = 60.0
"""How long an agent that was cut off looks for the others."""

_FAREWELL_S = 8.0
"""How long the coordinator waits for the others to read the end of the job: longer than a lease."""


def make_machine(spec: JobSpec) -> Machine:
    """Return the state of a job that begins."""
    kind = ElasticMachine if spec.elastic or spec.keep_going else Machine
    return kind(
        Settings(
            min_hosts=spec.nnodes[0],
            max_hosts=spec.nnodes[1],
            max_restarts=spec.max_restarts,
            join_timeout_s=spec.join_timeout_s,
            last_call_s=spec.last_call_s,
            min_ranks=spec.min_ranks,
            endpoint=spec.endpoint or "",
        )
    )


class Link(Protocol):
    """What an agent needs of the job's other agents. Threads: the agent's alone."""

    @property
    def run_id(self) -> str:
        """The job's name, equal on all agents."""
        ...

    @property
    def job_key(self) -> JobKey:
        """The key of the ranks' store."""
        ...

    @property
    def address(self) -> str:
        """The address of this host by which the job's other hosts reach it."""
        ...

    @property
    def store(self) -> str:
        """host:port of the ranks' store."""
        ...

    @property
    def fd(self) -> int:
        """Readable when there may be news; -1: there never are."""
        ...

    @property
    def expires_at(self) -> float | None:
        """When all workers must be dead, of `boottime`, should nobody be reached until then."""
        ...

    @property
    def gone(self) -> str:
        """Why this agent is no member any more; empty while it is one."""
        ...

    @property
    def settled(self) -> bool:
        """Whether the machine knows all that this agent has told."""
        ...

    @property
    def coordinates(self) -> bool:
        """Whether the other agents depend on this one's servers."""
        ...

    def join(self, host: str) -> str:
        """Become a member, under a name that nobody had before; return the name."""
        ...

    def tell(self, event: Event) -> None:
        """Say what has happened."""
        ...

    def machine(self) -> Machine:
        """Return the job's state as it was seen last."""
        ...

    def close(self) -> None:
        """Take leave."""
        ...


class Alone:
    """The link of a job on one host: its machine is fed directly."""

    fd = -1
    expires_at = None
    gone = ""
    settled, coordinates = True, False
    address = MASTER_ADDR

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self.run_id = spec.run_id or uuid.uuid4().hex
        self.job_key = mint() if spec.key is None else JobKey(spec.key)
        self._machine = make_machine(spec)
        # Not a TCPStore: DURE_STORE_BIND is for rank 0's store, and this one never leaves the host.
        self._server = StoreServer(listen(resolve(MASTER_ADDR, 0)), self.job_key)
        self.store = f"{MASTER_ADDR}:{self._server.port}"

    def join(self, host: str) -> str:
        """Be the only member."""
        self.tell(Joined("alone", host, self._spec.nproc, self._spec.node_rank))
        return "alone"

    def tell(self, event: Event) -> None:
        """Feed the machine."""
        self._machine.apply(event)

    def machine(self) -> Machine:
        """Return the machine."""
        return self._machine

    def close(self) -> None:
        """Let the store end when the last rank has left it."""
        self._server.retire()


class Linked:
    """The link of a job on several hosts.

    Args:
        spec: The job; its `endpoint` says where the agents join.
        key: The user's key; None where the state is in etcd.
        reaper: Who kills the ranks of this host past its deadline, or when this launcher dies.
        interrupted: A descriptor that becomes readable when the user has had enough.
        say: Called with a line for the user, while the others cannot be found.
    """

    def __init__(
        self,
        spec: JobSpec,
        key: JobKey | None,
        reaper: Reaper | None = None,
        *,
        interrupted: int = -1,
        say: Callable[[str], None] = keep_quiet,
    ) -> None:
        self._spec, self._reaper = spec, reaper
        self._key: JobKey | None = None
        self._finder: Finder | EtcdFinder
        if key is None:
            self._finder = EtcdFinder(spec, interrupted)
        else:
            self._key = control_key(key, spec.endpoint or "", spec.run_id or "")
            self._finder = Finder(spec, self._key, self._note_presence, interrupted, say)
        self._member: Member | None = None

    def join(self, host: str) -> str:
        """Find the job and become a member, the first time or again.

        Raises:
            LaunchError: Nobody was found in time, or the user had enough.
            UsageError: The others were told other things.
        """
        again = self._member is not None
        if self._member is not None:
            self._member.close()
            self._member = None
        limit_s = self._spec.join_timeout_s
        limit_s = min(limit_s, _REJOIN_S) if again else limit_s
        self._finder.begin()
        while True:
            shared = self._finder.reach(serve=not again)
            if shared is not None:
                member = Member(shared, self._renewed)
                try:
                    if self._enter(member, host, again=again):
                        self._member = member
                        self._appoint(member)
                        return member.agent
                except StoreError:
                    pass
                except BaseException:
                    member.close()
                    raise
                member.close()
            if not self._finder.wait(limit_s):
                raise self._lost_for_good(limit_s) if again else self._finder.nobody()

    def _enter(self, member: Member, host: str, *, again: bool) -> bool:
        spec, finder = self._spec, self._finder
        if isinstance(finder, EtcdFinder):
            begins, store, job_key = True, finder.ranks_store(), mint().raw
        elif finder.coordinator is not None:
            begins, store = True, finder.coordinator.store
            job_key = finder.coordinator.job_key.raw
        else:
            begins, store, job_key = False, "", b""
        terms = Terms(
            nnodes=spec.nnodes,
            max_restarts=spec.max_restarts,
            elastic=spec.elastic or spec.keep_going,
            min_ranks=spec.min_ranks,
            run_id=spec.run_id or "",
            store=store,
            job_key=job_key,
        )
        first = make_machine(spec) if begins else None
        joined = Joined(member.agent, host, spec.nproc, spec.node_rank, address=finder.address)
        return member.join(joined, terms, first, again=again)

    def _appoint(self, member: Member) -> None:
        """Tell the reaper what to say should this launcher die."""
        if self._reaper is None:
            return
        secret = b"" if self._key is None else self._key.raw
        if isinstance(self._finder, EtcdFinder):
            secret = self._finder.options.password.encode()
        will = LastWill(self._finder.endpoint, secret, member.agent, member.nonce)
        self._reaper.appoint(msgspec.msgpack.encode(will))

    def _renewed(self, deadline: float) -> None:
        if self._reaper is not None:
            self._reaper.extend(deadline)

    def _note_presence(self, key: str, there: bool) -> None:
        if self._member is not None:
            self._member.note_presence(key, there)

    def _lost_for_good(self, limit_s: float) -> LaunchError:
        who = "etcd" if isinstance(self._finder, EtcdFinder) else "the job's coordinator"
        return LaunchError(
            f"{who} was lost",
            elapsed_s=limit_s,
            seen=f"nobody answers at the endpoint {self._spec.endpoint} any more, so the ranks of "
            "this host were ended",
            fix="Start the job again on all hosts: it goes on from its last checkpoint. With "
            "--rdzv-backend etcd a job outlives any host.",
        )

    @property
    def _here(self) -> Member:
        assert self._member is not None
        return self._member

    @property
    def run_id(self) -> str:
        """The job's name."""
        return self._here.terms.run_id

    @property
    def job_key(self) -> JobKey:
        """The key of the ranks' store, which the coordinator minted."""
        return JobKey(self._here.terms.job_key)

    @property
    def address(self) -> str:
        """The address by which others reach this host."""
        return self._finder.address

    @property
    def store(self) -> str:
        """host:port of the ranks' store."""
        return self._here.terms.store

    @property
    def fd(self) -> int:
        """The member's."""
        return self._here.fd

    @property
    def expires_at(self) -> float | None:
        """The member's deadline."""
        return self._here.expires_at

    @property
    def gone(self) -> str:
        """Why this agent is no member any more."""
        if not self._here.gone and boottime() > self._here.expires_at:
            return "nobody was reached until its deadline"
        return self._here.gone

    @property
    def settled(self) -> bool:
        """Whether the state seen last has all that was told."""
        return self._here.settled

    @property
    def coordinates(self) -> bool:
        """Whether this launcher has the servers."""
        return self._finder.coordinator is not None

    def tell(self, event: Event) -> None:
        """Write it into the state."""
        self._here.tell(event)

    def machine(self) -> Machine:
        """Return the state seen last."""
        return self._here.machine()

    def close(self) -> None:
        """Leave; somebody waits a little for the others to read the end, and then clears it."""
        member = self._member
        if member is not None:
            waits = self.coordinates
            if isinstance(self._finder, EtcdFinder):
                state = member.machine()
                waits = state.phase is Phase.OVER and state.agents[:1] == (member.agent,)
            waits = waits and not member.gone
            member.finish()
            if waits and member.others_left(_FAREWELL_S):
                member.clear()
            member.close()
        self._finder.close()
