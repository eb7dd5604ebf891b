"""How an agent is linked to the job's other agents: not at all, or through the job's store.

Both kinds of link hold the machine and keep it fed. `Alone` feeds it directly: a job on one host
has no log in a store, no threads and no round trips. `Linked` goes through a `Pulse`.

Who serves the store of the endpoint: the agent on whose host the endpoint's address is, if its node
rank is 0 or free, and if nobody serves there yet. Everybody else dials until the join timeout, for
hosts come in any order, and runs a standby server, bound to the one address of this host from which
the endpoint is reached.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import msgspec

from dure.errors import LaunchError, StoreError, StoreTimeout, UsageError
from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import Event
from dure.launch.agent.machine import Machine, Settings
from dure.launch.agent.pulse import Pulse
from dure.launch.agent.watch import Heartbeat
from dure.launch.environment import MASTER_ADDR
from dure.launch.spec import JobSpec
from dure.store.address import Address, is_local, resolve
from dure.store.key import JobKey
from dure.store.ladder import Ladder
from dure.store.network import NetworkStore
from dure.store.server import StoreServer, listen

__all__ = ["Alone", "Link", "Linked", "make_machine"]

_TERMS = "dure/agents/terms"
_OPERATION = timedelta(seconds=2)
_HEARTBEAT = Heartbeat()
_SLICE_S = 0.5
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


class _Terms(msgspec.Struct, frozen=True):
    """What all agents of a job must agree on."""

    nnodes: tuple[int, int]
    max_restarts: int
    elastic: bool
    min_ranks: int
    run_id: str


class Linked:
    """The link of a job on several hosts.

    Args:
        spec: The job; its `endpoint` says where the agents meet.
        key: The job key.
        heartbeat: How the agents watch each other.
        interrupted: A descriptor that becomes readable when the user has had enough.

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
    ) -> None:
        self._spec, self._key = spec, key
        self._farewell_s = _FAREWELL_S
        with contextlib.ExitStack() as on_error:
            self._server, self._ladder = _meet(spec, key, interrupted)
            on_error.callback(self._server.stop)
            on_error.callback(self._ladder.close)
            self.run_id = _agree(spec, self._ladder.current)
            host, _, _ = self._server.endpoint.removeprefix("tcp://").rpartition(":")
            self.address = host.strip("[]")
            self.standby = f"{host}:{self._server.port}"
            self._servers = [self._server]
            self._pulse = Pulse(self._ladder, key, heartbeat, (_TERMS,), self._another)
            on_error.pop_all()
        self._machine = make_machine(spec)

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
        """Feed the machine; one whose log was found anew starts from the beginning."""
        afresh, news = self._pulse.take()
        if afresh:
            self._machine = make_machine(self._spec)
        for event in news:
            self._machine.apply(event)
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
        return f"{_bracketed(self.address)}:{server.port}"


def _meet(spec: JobSpec, key: JobKey, interrupted: int) -> tuple[StoreServer, Ladder]:
    """Serve the endpoint's store, or find it and run a standby."""
    assert spec.endpoint is not None
    host, port = _split(spec.endpoint)
    there = resolve(host, port, "the endpoint's host")
    first = f"{_bracketed(there.ip)}:{port}"
    serves = spec.serves
    if serves is None:
        serves = spec.node_rank in (None, 0) and is_local(host)
    if serves:
        with contextlib.suppress(StoreError):  # taken: another agent of this host was first
            server = StoreServer(listen(there), key)
            ladder = Ladder([first], key, own=first, timeout=_OPERATION)
            return _or_stop(server, ladder, ladder.lead)
    ip = _own_address(spec, there)
    server = StoreServer(listen(resolve(ip, 0, "the local address")), key)
    own = f"{_bracketed(ip)}:{server.port}"
    ladder = Ladder([first], key, own=own, timeout=_OPERATION)

    def join() -> None:
        _dial(spec, ladder, interrupted)
        ladder.stand_by()

    return _or_stop(server, ladder, join)


def _dial(spec: JobSpec, ladder: Ladder, interrupted: int) -> None:
    """Look for the store until the join timeout, or until the user has had enough."""
    start = time.monotonic()
    while (elapsed_s := time.monotonic() - start) < spec.join_timeout_s:
        try:
            ladder.join(min(_SLICE_S, spec.join_timeout_s - elapsed_s))
            return
        except StoreTimeout:
            if interrupted >= 0 and select.select([interrupted], [], [], 0)[0]:
                raise LaunchError(
                    "interrupted while looking for the job's other hosts", elapsed_s=elapsed_s
                ) from None
    raise LaunchError(
        "the job's other hosts cannot be found",
        elapsed_s=elapsed_s,
        seen=f"nobody answers at the endpoint {spec.endpoint}",
        fix="Check that `dure run` runs on that host with the same endpoint, and that no "
        "firewall is between.",
    )


def _or_stop(
    server: StoreServer, ladder: Ladder, action: Callable[[], object]
) -> tuple[StoreServer, Ladder]:
    try:
        action()
    except BaseException:
        ladder.close()
        server.stop()
        raise
    return server, ladder


def _agree(spec: JobSpec, store: NetworkStore) -> str:
    """Compare what this agent was told with what the first was; return the job's name."""
    mine = _Terms(
        nnodes=spec.nnodes,
        max_restarts=spec.max_restarts,
        elastic=spec.elastic or spec.keep_going,
        min_ranks=spec.min_ranks,
        run_id=spec.run_id or uuid.uuid4().hex,
    )
    said = store.compare_set(_TERMS, "", msgspec.msgpack.encode(mine))
    theirs = msgspec.msgpack.decode(said, type=_Terms)
    names = [name for name in _Terms.__struct_fields__ if name != "run_id" or spec.run_id]
    differ = [name for name in names if getattr(mine, name) != getattr(theirs, name)]
    if differ:
        seen = [f"{n}: {getattr(theirs, n)} there, {getattr(mine, n)} here" for n in differ]
        raise UsageError(
            "this host was told other things than the first",
            seen="; ".join(seen),
            fix="Start `dure run` with the same flags on every host, or use another endpoint for "
            "another job.",
        )
    return theirs.run_id


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            "the endpoint is not HOST:PORT", seen=repr(endpoint), fix="For example node1:29400."
        )
    host = host.strip("[]")
    if host in ("0.0.0.0", "::", "*"):
        raise UsageError(
            "the endpoint must be one address of one host",
            seen=repr(endpoint),
            fix="Name the interface that the job's hosts share.",
        )
    return host, int(port)


def _bracketed(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _own_address(spec: JobSpec, there: Address) -> str:
    """Return the address of this host from which the endpoint is reached."""
    if spec.local_addr is not None:
        return resolve(spec.local_addr, 0, "the local address").ip
    with socket.socket(there.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there.ip, there.port))  # sends nothing: only asks which interface it is
        except OSError as error:
            raise LaunchError(
                "there is no way to the endpoint", seen=f"{spec.endpoint}: {error.strerror}"
            ) from None
        return str(probe.getsockname()[0])
