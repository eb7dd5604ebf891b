"""How an agent becomes a member of its job: alone, or by finding the others, as often as it must.

A job on one host has no lease and no deadline (`Alone`): its state is fed directly, without
threads or round trips. On several hosts (`Linked`) an agent finds the state (`finding`) and becomes
a `Member`; when it has been given up, it does both again under another name.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable

import msgspec

from dure.errors import LaunchError, StoreError
from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import Event, Joined, Settings
from dure.launch.agent.finding import EtcdFinder, Finder, keep_quiet
from dure.launch.agent.machine import Machine, Phase
from dure.launch.agent.membership import LastWill, Member, Terms
from dure.launch.ranks.environment import MASTER_ADDR
from dure.launch.ranks.reaper import Reaper
from dure.launch.spec import JobSpec
from dure.store.address import resolve
from dure.store.key import JobKey, control_key, mint
from dure.store.listener import listen
from dure.store.server import StoreServer

__all__ = ["Alone", "Link", "Linked", "OnlyMember", "make_machine"]

_REJOIN_S = 60.0
"""How long an agent that was cut off looks for the others."""

_OUTCOME_S = 5.0
"""The same, of a job that ends with a host's loss: it can only learn how."""

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


class OnlyMember:
    """The one member of a job on one host; as `Member`, without lease, deadline and news."""

    agent = "alone"
    address = MASTER_ADDR
    fd = -1
    expires_at = None
    gone = ""

    def __init__(self, spec: JobSpec, host: str, store: str, job_key: JobKey) -> None:
        self.run_id = spec.run_id or uuid.uuid4().hex
        self.store, self.job_key = store, job_key
        self._machine = make_machine(spec)
        self.tell(Joined(self.agent, host, spec.nproc, spec.node_rank))

    def tell(self, event: Event) -> None:
        """Feed the state."""
        self._machine.apply(event)

    def machine(self) -> Machine:
        """Return the state."""
        return self._machine


class Alone:
    """The link of a job on one host, which has the ranks' store."""

    coordinates = False

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._key = mint() if spec.key is None else JobKey(spec.key)
        # Not a TCPStore: DURE_STORE_BIND is for rank 0's store, and this one never leaves the host.
        self._server = StoreServer(listen(resolve(MASTER_ADDR, 0)), self._key)

    def join(self, host: str) -> OnlyMember:
        """Be the only member."""
        return OnlyMember(self._spec, host, f"{MASTER_ADDR}:{self._server.port}", self._key)

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

    Threads: the agent's alone.
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
        self._secret = b""  # what opens the place where the state is
        self._finder: Finder | EtcdFinder
        if key is None:
            self._finder = EtcdFinder(spec, interrupted)
            self._secret = self._finder.options.password.encode()
        else:
            control = control_key(key, spec.endpoint or "", spec.run_id or "")
            self._finder = Finder(spec, control, self._note_presence, interrupted, say)
            self._secret = control.raw
        self._member: Member | None = None

    @property
    def coordinates(self) -> bool:
        """Whether the other agents depend on this launcher's servers."""
        return self._finder.coordinator is not None

    def join(self, host: str) -> Member:
        """Find the job and become a member under a name that nobody had, the first time or again.

        Raises:
            LaunchError: Nobody was found in time, or the user had enough.
            UsageError: The others were told other things.
        """
        former = ""
        if self._member is not None:
            former = self._member.agent
            self._member.close()
            self._member = None
        limit_s = self._spec.join_timeout_s
        if former:
            goes_on = self._spec.max_restarts > 0 or self._spec.elastic or self._spec.keep_going
            limit_s = min(limit_s, _REJOIN_S if goes_on else _OUTCOME_S)
        self._finder.begin()
        while True:
            shared = self._finder.reach(serve=not former)
            if shared is not None:
                member = Member(shared, self._renewed)
                try:
                    if self._enter(member, host, former):
                        self._member = member
                        self._appoint(member)
                        return member
                except StoreError:
                    pass
                except BaseException:
                    member.close()
                    raise
                member.close()
            if not self._finder.wait(limit_s):
                raise self._lost_for_good(limit_s) if former else self._finder.nobody()

    def _enter(self, member: Member, host: str, former: str) -> bool:
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
        return member.join(joined, terms, first, former=former)

    def _appoint(self, member: Member) -> None:
        """Tell the reaper what to say should this launcher die."""
        if self._reaper is not None:
            will = LastWill(self._finder.endpoint, self._secret, member.agent, member.nonce)
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


Link = Alone | Linked
