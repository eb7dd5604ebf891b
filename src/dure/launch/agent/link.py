"""How an agent is linked to the job's other agents: not at all, or through the job's store.

Both kinds of link hold the machine and keep it fed. `Alone` feeds it directly: a job on one host
has no log in a store, no threads and no round trips. `Linked` goes through a `Pulse`.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import uuid
from collections.abc import Callable
from typing import Protocol

import msgspec

import dure
from dure import env
from dure.errors import StoreError, UsageError
from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import Event, Refused
from dure.launch.agent.finding import OVER, bracketed, keep_quiet, meet
from dure.launch.agent.journal import write_once
from dure.launch.agent.machine import Machine, Phase
from dure.launch.agent.pulse import Pulse
from dure.launch.agent.settings import Settings
from dure.launch.agent.watch import Heartbeat, Watch
from dure.launch.ranks.environment import MASTER_ADDR
from dure.launch.spec import JobSpec
from dure.store.address import resolve
from dure.store.key import JobKey
from dure.store.listener import listen
from dure.store.network import NetworkStore
from dure.store.server import StoreServer

__all__ = ["Alone", "Link", "Linked", "make_machine"]

_TERMS = "dure/agents/terms"
_HEARTBEAT = Heartbeat()
_HANDOVER_S = 0.3
_FAREWELL_S = 5.0
"""How long the one who holds the store waits for the others to read the end of the log."""


class Link(Protocol):
    """What an agent needs of its link. Threads: the agent's alone."""

    @property
    def run_id(self) -> str:
        """The job's name, equal on all agents."""
        ...

    @property
    def address(self) -> str:
        """The address of this host by which the job's other hosts reach it."""
        ...

    @property
    def store(self) -> str:
        """host:port of the job's store, for ranks of this host."""
        ...

    @property
    def standby(self) -> str:
        """host:port of this agent's own server."""
        ...

    @property
    def fd(self) -> int:
        """Readable when there may be news; -1: there never are."""
        ...

    @property
    def fence_at(self) -> float | None:
        """When to end all workers, should nobody be reached until then."""
        ...

    @property
    def cut(self) -> str:
        """Why nobody can be reached any more; empty while all is well."""
        ...

    @property
    def settled(self) -> bool:
        """Whether the machine knows all that this agent has told."""
        ...

    def introduce(self, agent: str) -> None:
        """Beat under this name from now on."""
        ...

    def tell(self, event: Event) -> None:
        """Add an event to the log."""
        ...

    def machine(self) -> Machine:
        """Return the machine, fed with all that is known now."""
        ...

    @property
    def leading(self) -> bool:
        """Whether other hosts' agents depend on this one's store."""
        ...

    def hand_over(self) -> None:
        """The job goes on without this agent: `close` lets the others move on at once."""
        ...

    def close(self) -> None:
        """Take leave."""
        ...


def make_machine(spec: JobSpec) -> Machine:
    """Return the machine that a job needs."""
    kind = ElasticMachine if spec.elastic or spec.keep_going else Machine
    return kind(_settings(spec))


def _settings(spec: JobSpec) -> Settings:
    return Settings(
        min_hosts=spec.nnodes[0],
        max_hosts=spec.nnodes[1],
        max_restarts=spec.max_restarts,
        join_timeout_s=spec.join_timeout_s,
        last_call_s=spec.last_call_s,
        min_ranks=spec.min_ranks,
        quorum=spec.quorum,
        endpoint=spec.endpoint or "",
    )


class Alone:
    """The link of a job on one host: its machine is fed directly."""

    fd = -1
    fence_at = None
    cut = ""
    settled, leading = True, False
    address = MASTER_ADDR

    def __init__(self, spec: JobSpec, key: JobKey) -> None:
        self.run_id = spec.run_id or uuid.uuid4().hex
        self._machine = make_machine(spec)
        # Not a TCPStore: DURE_STORE_BIND is for rank 0's store, and this one never leaves the host.
        self._server = StoreServer(listen(resolve(MASTER_ADDR, 0)), key)
        self.store = self.standby = f"{MASTER_ADDR}:{self._server.port}"

    def introduce(self, agent: str) -> None:
        """Nobody listens."""

    def tell(self, event: Event) -> None:
        """Feed the machine."""
        self._machine.apply(event)

    def machine(self) -> Machine:
        """Return the machine."""
        return self._machine

    def hand_over(self) -> None:
        """There is nobody."""

    def close(self) -> None:
        """Let the store end when the last rank has left it."""
        self._server.retire()


class _Version(msgspec.Struct, frozen=True):
    """What each version's terms begin with; what agents tell each other is of one version."""

    version: str = "unknown"


class _Terms(_Version, frozen=True, kw_only=True):
    """What all agents of a job must agree on."""

    nnodes: tuple[int, int]
    max_restarts: int
    elastic: bool
    min_ranks: int
    quorum: bool
    run_id: str


class Linked:
    """The link of a job on several hosts.

    Args:
        spec: The job; its `endpoint` says where the agents meet.
        key: The job key.
        heartbeat: How the agents watch each other.
        interrupted: A descriptor that becomes readable when the user has had enough.
        say: Called with a line for the user, while the others cannot be found.

    Raises:
        LaunchError: The endpoint cannot be reached, or an agent was told other things than we.
        StoreRefused: Whoever is there has another key.
    """

    def __init__(
        self,
        spec: JobSpec,
        key: JobKey,
        *,
        heartbeat: Heartbeat = _HEARTBEAT,
        interrupted: int = -1,
        say: Callable[[str], None] = keep_quiet,
    ) -> None:
        self._spec, self._key = spec, key
        self._farewell_s = _FAREWELL_S
        with contextlib.ExitStack() as on_error:
            self._server, self._ladder = meet(spec, key, interrupted, say)
            on_error.callback(self._server.stop)
            on_error.callback(self._ladder.close)
            self.run_id = _agree(spec, self._ladder.current)
            host, _, _ = self._server.endpoint.removeprefix("tcp://").rpartition(":")
            self.address = host.strip("[]")
            self.standby = f"{host}:{self._server.port}"
            self._servers = [self._server]
            make = functools.partial(make_machine, spec)
            watch = Watch(key, heartbeat)
            self._pulse = Pulse(self._ladder, watch, (_TERMS,), self._another, make)
            on_error.pop_all()
        self._machine = make()

    @property
    def store(self) -> str:
        """host:port of the store in use."""
        return self._pulse.store

    @property
    def fd(self) -> int:
        """The pulse's."""
        return self._pulse.fd

    @property
    def fence_at(self) -> float | None:
        """When the others may give us up, less the time that killing takes."""
        return self._pulse.fence_at

    @property
    def cut(self) -> str:
        """Why the follower has given up."""
        return self._pulse.cut

    @property
    def settled(self) -> bool:
        """Whether the log that was read has all of our own lines."""
        return self._pulse.settled

    def introduce(self, agent: str) -> None:
        """Beat under this name."""
        self._pulse.me = agent

    def tell(self, event: Event) -> None:
        """Write it into the log; the machine gets it when it comes back from there."""
        self._pulse.tell(event)

    def machine(self) -> Machine:
        """Feed the machine; if the log was found anew, another one, from the beginning."""
        afresh, news = self._pulse.take()
        if afresh is not None:
            self._machine = afresh
        for event in news:
            self._machine.apply(event)
        self._pulse.judge(self._machine.prevails)
        return self._machine

    @property
    def leading(self) -> bool:
        """Whether the store in use is ours."""
        return self._pulse.leading

    def hand_over(self) -> None:
        """Let the others read our last words, and lose the store."""
        self._farewell_s = _HANDOVER_S

    def close(self) -> None:
        """Leave; who holds the store waits a little for the others to read its end."""
        held = self._pulse.store if self._pulse.leading else ""
        if held and self._machine.phase is Phase.OVER:
            with contextlib.suppress(StoreError):
                self._ladder.current.set(OVER, b"")
        self._pulse.close()
        for server in self._servers:
            if held.endswith(f":{server.port}"):
                server.finish(self._farewell_s)
            else:
                server.stop()

    def _another(self) -> str:
        """Run another standby: the first server holds a store that the job has left."""
        server = StoreServer(listen(resolve(self.address, 0, "the local address")), self._key)
        self._servers.append(server)
        return f"{bracketed(self.address)}:{server.port}"


def _agree(spec: JobSpec, store: NetworkStore) -> str:
    """Compare what this agent was told with what the first was; return the job's name."""
    mine = _Terms(
        version=dure.__version__,
        nnodes=spec.nnodes,
        max_restarts=spec.max_restarts,
        elastic=spec.elastic or spec.keep_going,
        min_ranks=spec.min_ranks,
        quorum=spec.quorum,
        run_id=spec.run_id or uuid.uuid4().hex,
    )
    said = store.compare_set(_TERMS, "", msgspec.msgpack.encode(mine))
    theirs = _read_terms(said)
    names = [name for name in _Terms.__struct_fields__ if name != "run_id" or spec.run_id]
    differ = [name for name in names if getattr(mine, name) != getattr(theirs, name)]
    if differ:
        seen = [f"{n}: {getattr(theirs, n)} there, {getattr(mine, n)} here" for n in differ]
        host = env.text("DURE_HOST_ID") or socket.gethostname()
        with contextlib.suppress(StoreError):
            write_once(store, Refused(host, "; ".join(seen)))
        raise UsageError(
            "this host was told other things than the first",
            seen="; ".join(seen),
            fix="Start `dure run` with the same flags on every host, or use another endpoint for "
            "another job.",
        )
    return theirs.run_id


def _read_terms(said: bytes) -> _Terms:
    """Return the terms of a job of this version.

    One of another version is left alone: it may not even be able to read why we do not come.
    """
    theirs = _Version()
    try:
        theirs = msgspec.msgpack.decode(said, type=_Version)
        if theirs.version == dure.__version__:
            return msgspec.msgpack.decode(said, type=_Terms)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    raise UsageError(
        "the job at this endpoint runs with another version of Dure",
        seen=f"version {theirs.version} there, {dure.__version__} here",
        fix="Install the same version on all hosts, or use another endpoint for another job.",
    )
