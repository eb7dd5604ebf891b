"""An agent's place among the job's agents: the shared state, its lease, and its deadline.

    dure/state             the job's state
    dure/members/AGENT     a key with a lease; its value is known to that agent alone
    dure/refused           which builds differed, written by an agent that may not join

**Writing.** Who has an event reads the state, applies the event and writes the result in one
transaction, which expects the state that was read and the writer's own leased key. If that fails,
it reads again. An answer may be lost and the write have happened: then the event is applied again,
and changes nothing (`events`). Who sees a member's key vanish writes `Lost`. Nobody leads.

**Deadlines.** A lease is renewed every second, and lasts as long as a host may be silent
(`silence`): a launcher that is busy or stopped for a while, or whose machine is paused, loses
nothing. An agent's deadline is when its last renewal that was acknowledged was *sent*, plus the
lease; at that time its ranks die, by its own hand or its reaper's. Its key vanishes when the last
renewal was *received*, plus the lease and a margin. So the ranks of a host that was cut off are
dead before the others go on. The clock is CLOCK_BOOTTIME, which counts while a machine sleeps.

The keys are lost with the coordinator's launcher. If the coordinator's host refuses connections at
its port, the launcher has ended, and a member does not wait for its deadline.

Past its deadline an agent looks for the others for a while, and joins as another member.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta

import msgspec

from dure.errors import StoreError, StoreLost, UsageError
from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import Event, Joined, Lost, Missing, Refused
from dure.launch.agent.machine import Machine, Phase
from dure.store.builds import SAME_BUILD, own_build
from dure.store.identity import host_name
from dure.store.key import JobKey
from dure.store.network import NetworkStore
from dure.store.shared import EVERYTHING, Shared
from dure.store.silence import silence_s

__all__ = ["LastWill", "Member", "boottime", "open_shared", "read_state", "say_dead"]

PREFIX = "dure/"
STATE = "dure/state"
_MEMBERS = "dure/members/"
_REFUSED = "dure/refused"

_RENEW_S = 1.0
"""How often a lease is renewed; sooner where it is shorter than four times that."""

_MISSING_S = 1.0
"""How long a broken connection may take to be opened again before the round is stopped."""

_LOOK_S = 1.0
_AGAIN_S = 0.2


def boottime() -> float:
    """Return the time of the clock that leases are counted by."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def open_shared(endpoint: str, secret: bytes, patience_s: float) -> Shared:
    """Connect to where the state is: etcd://..., or a control server (tcp://...).

    Raises:
        StoreError: Nobody answers there, or whoever does has another key or password.
    """
    if not endpoint.startswith("etcd://"):
        # An answer is waited for on the same connection: to close it would look like a death.
        key, timeout = JobKey(secret), timedelta(seconds=silence_s() / 2)
        return NetworkStore(endpoint, key, timeout=timeout, patience_s=patience_s)
    from dure.store.etcd import EtcdStore  # lazy: few jobs use it, and it brings ssl along
    from dure.store.etcd_gateway import EtcdOptions  # lazy: as before

    options, job = EtcdOptions.from_url(endpoint)
    options = replace(options, password=secret.decode())
    return EtcdStore(options, job, timedelta(seconds=2))


# --- the shared value -----------------------------------------------------------------------------


class _Record(msgspec.Struct, array_like=True, frozen=True):
    """The value of the state's key. Every version reads it, so fields are only appended.

    Attributes:
        build: Of those who write it.
        machine: The state, which only they can read.
        host: Of the one who wrote it last.
    """

    build: str
    machine: msgspec.Raw = msgspec.Raw()
    host: str = "the job's other hosts"


_read_record = msgspec.msgpack.Decoder(_Record).decode
_read_machine = msgspec.msgpack.Decoder(Machine | ElasticMachine).decode


def _pack(machine: Machine) -> bytes:
    raw = msgspec.Raw(msgspec.msgpack.encode(machine))
    return msgspec.msgpack.encode(_Record(str(own_build()), raw, host_name()))


def read_state(packed: bytes) -> Machine:
    """Return the state of a job of this build, the caller's own.

    Raises:
        UsageError: It is one of another build, or none.
    """
    theirs, mine = _Record("an unknown build"), str(own_build())
    try:
        theirs = _read_record(packed)
        if theirs.build == mine:
            return _read_machine(theirs.machine)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    raise _OtherBuild(
        "the job at this endpoint runs with another build of Dure",
        seen=f"{theirs.build} on {theirs.host}, {mine} on {host_name()}",
        fix=f"{SAME_BUILD} Or use another endpoint for another job.",
    )


class _OtherBuild(UsageError):
    """The state is one of another build."""


def _compare(mine: Machine, theirs: Machine) -> None:
    """Refuse to join a job that was told other things."""
    here, there = _told(mine), _told(theirs)
    differ = [flag for flag in here if here[flag] != there[flag]]
    if differ:
        raise UsageError(
            "this host was told other things than the first",
            seen="; ".join(f"{flag}: {there[flag]} there, {here[flag]} here" for flag in differ),
            fix="Start `dure run` with the same flags on every host, or use another endpoint for "
            "another job.",
        )


def _told(machine: Machine) -> dict[str, object]:
    """Return what all hosts of a job must have been told alike."""
    settings = machine.settings
    return {
        "--nnodes": f"{settings.min_hosts}:{settings.max_hosts}",
        "--max-restarts": settings.max_restarts,
        "--elastic": isinstance(machine, ElasticMachine),
        "--min-ranks": settings.min_ranks,
        "--rdzv-id": settings.run_id,
    }


# --- one membership -------------------------------------------------------------------------------


class Member:
    """One agent's membership, from its joining until it leaves or is given up.

    Two threads do all that may have to wait for the network: the *listener* follows the keys, the
    *speaker* renews the lease and writes events. `join` comes first, and starts them.

    Args:
        shared: Where the state is; this member's own from now on.
        renewed: Told of each new deadline.

    Attributes:
        agent: Its name, which nobody had before.
        address: That of this host, by which the job's other hosts reach it.

    Threads: all methods belong to the agent's thread but `note_presence`.
    """

    def __init__(
        self, shared: Shared, renewed: Callable[[float], None] = lambda deadline: None
    ) -> None:
        self.agent = uuid.uuid4().hex[:12]
        self.nonce = secrets.token_bytes(16)
        self.address = ""
        self._gone = ""
        self._shared, self._renewed = shared, renewed
        self._lock = threading.Condition()
        self._revision, self._packed = EVERYTHING, b""  # of the state seen last
        self._machine: tuple[bytes, Machine] | None = None
        self._pending: list[Event] = []
        self._absent: dict[str, float] = {}  # agents whose connections broke, and when
        self._closing = False
        self._lease_s = self._deadline = 0.0
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._threads: list[threading.Thread] = []

    # --- joining -----------------------------------------------------------------------------

    def join(self, joined: Joined, mine: Machine, *, begins: bool, former: str = "") -> bool:
        """Become a member; False: there is no job here (yet).

        Args:
            joined: What is said; its agent is this one.
            mine: The state of a job that begins as this agent was told; without a name, the job
                may have any.
            begins: Whether it may, where there is none, or one that nobody has any more.
            former: Its name as a member of this job before, of which nothing is left here.

        Raises:
            UsageError: The others were told other things.
            StoreError: The keys cannot be reached.
        """
        if former:
            self._shared.release(_MEMBERS + former)
        while True:
            _, keys = self._shared.look(PREFIX, EVERYTHING, 0.0)
            packed = keys.get(STATE)
            try:
                machine = None if packed is None else read_state(packed)
            except _OtherBuild as error:
                if former or any(key.startswith(_MEMBERS) for key in keys):
                    # Notify the waiting hosts; otherwise they wait until the join timeout.
                    self._shared.transact({}, {_REFUSED: str(error.seen).encode()})
                    raise
                machine = None  # no host is left in that job
            if machine is not None and not former and _is_over(machine, keys):
                machine = None
            run_id = mine.settings.run_id
            changes: dict[str, bytes | None] = {}
            if machine is not None:
                run_id = run_id or machine.settings.run_id
                _compare(_named(mine, run_id), machine)
            elif begins and not former:
                machine = _named(mine, run_id or uuid.uuid4().hex)
                changes[_REFUSED] = None  # of an earlier job
            else:
                self._shared.release(self._key)
                return False
            machine.apply(joined)
            settings, sent = machine.settings, boottime()
            self._shared.hold(self._key, self.nonce, settings.lease_s + settings.margin_s)
            if self._write(packed, machine, changes):
                self.address, self._lease_s = joined.address, settings.lease_s
                self._extend(sent)
                self._take(*self._shared.look(PREFIX, EVERYTHING, 0.0))
                self._start()
                return True

    @property
    def _key(self) -> str:
        return _MEMBERS + self.agent

    def _write(
        self, old: bytes | None, new: Machine, changes: Mapping[str, bytes | None] | None = None
    ) -> bool:
        expect = {STATE: old, self._key: self.nonce}
        return self._shared.transact(expect, {STATE: _pack(new), **(changes or {})})

    def _start(self) -> None:
        for run, name in ((self._listen, "listener"), (self._speak, "speaker")):
            thread = threading.Thread(
                target=self._safely, args=(run,), name=f"dure-agent-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    # --- the agent's thread ------------------------------------------------------------------

    @property
    def gone(self) -> str:
        """Why this agent is no member any more; empty while it is one."""
        if not self._gone and boottime() > self._deadline:
            self._leave("nobody was reached until its deadline")
        return self._gone

    @property
    def fd(self) -> int:
        """Readable when there may be news."""
        return self._wakened.fileno()

    @property
    def expires_at(self) -> float:
        """The deadline, of `boottime`."""
        return self._deadline

    @property
    def settled(self) -> bool:
        """Whether the state seen last knows all that was told."""
        with self._lock:
            return not self._pending

    def tell(self, event: Event) -> None:
        """Write an event into the state, as soon as possible."""
        with self._lock:
            self._pending.append(event)
            self._lock.notify_all()

    def machine(self) -> Machine:
        """Return the state as it was seen last."""
        with contextlib.suppress(BlockingIOError):
            while self._wakened.recv(4096):
                pass
        with self._lock:
            packed = self._packed
        if self._machine is None or self._machine[0] is not packed:
            self._machine = packed, read_state(packed)
        return self._machine[1]

    def note_presence(self, key: str, there: bool) -> None:
        """Take note that an agent's connection broke, or is there again; from any thread."""
        agent = key.removeprefix(_MEMBERS)
        with self._lock:
            if there:
                self._absent.pop(agent, None)
            else:
                self._absent.setdefault(agent, boottime())
            self._lock.notify_all()

    def others_left(self, limit_s: float) -> bool:
        """Wait until no other agent is a member; tell whether that is so."""
        until, since = boottime() + limit_s, EVERYTHING
        with contextlib.suppress(StoreError):
            while True:
                since, keys = self._shared.look(_MEMBERS, since, max(0.0, until - boottime()))
                if not keys.keys() - {self._key}:
                    return True
                if boottime() >= until:
                    return False
        return False

    def clear(self) -> None:
        """Delete all keys of the job, where they would outlive it."""
        if (clear := getattr(self._shared, "clear", None)) is not None:
            with contextlib.suppress(StoreError):
                clear()

    def finish(self, timeout_s: float = 2.0) -> None:
        """Write what is not written yet, and give the lease back; the keys can still be read."""
        with self._lock:
            self._lock.wait_for(lambda: not self._pending or bool(self._gone), timeout_s)
            self._closing = True
            self._lock.notify_all()
        with contextlib.suppress(StoreError):
            self._shared.release(self._key)

    def close(self) -> None:
        """End both threads, and let go of everything."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if (end := getattr(self._shared, "close", None)) is not None:
            end()  # wakes a thread that waits in it
        for thread in self._threads:
            thread.join(5.0)
        self._waker.close()
        self._wakened.close()

    # --- both threads ------------------------------------------------------------------------

    def _safely(self, run: Callable[[], None]) -> None:
        """Run a thread; an error that nobody foresaw ends the membership, not in silence."""
        try:
            run()
        except Exception as error:
            self._leave(f"{type(error).__name__}: {error}")
            if not self._closing:
                raise

    @property
    def _stopped(self) -> bool:
        return self._closing or bool(self._gone)

    def _leave(self, why: str) -> None:
        """Be no member any more."""
        with self._lock:
            self._gone = self._gone or why
            self._lock.notify_all()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"!")

    def _extend(self, sent: float) -> None:
        self._deadline = sent + self._lease_s
        self._renewed(self._deadline)

    def _take(self, revision: int, keys: dict[str, bytes]) -> None:
        """Take note of the keys as they are, unless newer ones were seen."""
        if keys.get(self._key) != self.nonce:
            self._leave("the others have given this host up")
            return
        with self._lock:
            if revision < self._revision or STATE not in keys:
                return
            self._revision, self._packed = revision, keys[STATE]
        self._wake()
        machine = read_state(keys[STATE])
        if _REFUSED in keys and machine.waits_for_first:
            self.tell(Refused(keys[_REFUSED].decode()))
        silent_s = machine.settings.lease_s + machine.settings.margin_s
        for agent in machine.agents:
            if _MEMBERS + agent not in keys:
                self.tell(Lost(agent, f"nothing was heard of it for {silent_s:g} s"))

    # --- the listener ------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._stopped:
            try:
                self._take(*self._shared.look(PREFIX, self._revision, _LOOK_S))
            except StoreError:
                self._rest()

    def _rest(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._stopped, _AGAIN_S)

    # --- the speaker -------------------------------------------------------------------------

    def _speak(self) -> None:
        renew_at = boottime()  # at once, which opens this thread's connection
        while not self._stopped:
            with self._lock:
                self._look_for_missing()
                if not self._pending:
                    due = [at + _MISSING_S for at in self._absent.values()]
                    self._lock.wait(max(0.0, min([renew_at, *due]) - boottime()))
                events = list(self._pending)
            try:
                sent = boottime()
                if sent >= renew_at:
                    if not self._shared.renew(self._key):
                        self._leave("the others have given this host up")
                        return
                    self._extend(sent)
                    renew_at = sent + min(_RENEW_S, self._lease_s / 4)
                elif events and not self._stopped:
                    self._tell_all(events)
            except StoreError as error:
                if boottime() > self._deadline:
                    self._leave("nobody was reached until its deadline")
                elif isinstance(error, StoreLost) and self._server_has_ended():
                    self._leave("the coordinator's launcher has ended")
                self._rest()

    def _server_has_ended(self) -> bool:
        ask = getattr(self._shared, "server_has_ended", None)
        return ask is not None and ask()

    def _look_for_missing(self) -> None:
        """Tell of agents whose connections have not been opened again; the lock is held."""
        for agent, at in list(self._absent.items()):
            if boottime() >= at + _MISSING_S:
                del self._absent[agent]
                plan = read_state(self._packed).plan
                if plan is not None:
                    self._pending.append(Missing(agent, plan.number))

    def _tell_all(self, events: list[Event]) -> None:
        """Try once to write events; they are pending until the state that was seen has them."""
        with self._lock:
            packed = self._packed
        before, after = read_state(packed), read_state(packed)
        for event in events:
            after.apply(event)
        if after == before:
            with self._lock:
                del self._pending[: len(events)]
                self._lock.notify_all()
            self._wake()
            return
        self._write(packed, after)
        self._take(*self._shared.look(PREFIX, EVERYTHING, 0.0))


def _named(machine: Machine, run_id: str) -> Machine:
    """Return a copy of a state that has not begun, whose job has this name."""
    return type(machine)(replace(machine.settings, run_id=run_id))


def _is_over(machine: Machine, keys: dict[str, bytes]) -> bool:
    """Tell whether a job has ended, or nobody is left who was in it."""
    living = any(_MEMBERS + agent in keys for agent in machine.agents)
    return machine.phase is Phase.OVER or not living


# --- for the reaper -------------------------------------------------------------------------------


class LastWill(msgspec.Struct, frozen=True):
    """What the reaper needs to say that an agent has died; see `open_shared`."""

    endpoint: str
    secret: bytes
    agent: str
    nonce: bytes


def say_dead() -> None:
    """Say that an agent's ranks are dead, and release its lease: the reaper's last act.

    Standard input has what the launcher gave the reaper.
    """
    will = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=LastWill)
    shared = open_shared(will.endpoint, will.secret, 1.0)
    key = _MEMBERS + will.agent
    for _ in range(16):
        _, keys = shared.look(PREFIX, EVERYTHING, 0.0)
        if STATE not in keys or keys.get(key) != will.nonce:
            break
        machine = read_state(keys[STATE])
        machine.apply(Lost(will.agent, "its launcher was killed"))
        expect = {STATE: keys[STATE], key: will.nonce}
        if shared.transact(expect, {STATE: _pack(machine), key: None}):
            break
