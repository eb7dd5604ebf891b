"""The state of a job in etcd, for a job that survives the loss of any of its hosts.

    /dure/JOB/control/state             the state
    /dure/JOB/control/members/AGENT     a member's nonce, with its lease

No host coordinates. An agent that has an event reads the state, applies the event and writes the
result in one transaction, which expects the state's revision and the agent's own leased key; if
another agent was faster, it reads again. If an answer is lost, the event is applied again, and
changes nothing (`events`). Each agent that sees a member's key vanish applies `Lost`.

An agent keeps one stream of changes of these keys, and reads them after each change, so one that
waits asks only for the renewal of its lease.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import msgspec

from dure.errors import StoreError, StoreLost, StoreTimeout
from dure.launch.agent.elastic import ElasticState
from dure.launch.agent.events import Event, Lost, Settings
from dure.launch.agent.messages import (
    Accepted,
    Admitted,
    Answer,
    Gone,
    Heartbeat,
    JoinRequest,
    LeaveRequest,
    Message,
    NoJob,
    View,
    WatchRequest,
    other_build,
    pack,
    why_other_flags,
)
from dure.launch.agent.state import JobPhase, JobState
from dure.launch.signals import Interrupted, pause
from dure.launch.spec import JobSpec
from dure.store.address import interface_to
from dure.store.builds import own_build
from dure.store.etcd_gateway import (
    EtcdConnection,
    EtcdOptions,
    Gateway,
    Unanswered,
)
from dure.store.etcd_requests import (
    Json,
    KeyValue,
    delete,
    has_revision,
    keys_below,
    put,
    range_below,
)
from dure.store.key import mint

__all__ = ["EtcdControl", "EtcdJobEndpoint"]

_DIAL_S = 0.5

_STATE, _MEMBERS = "state", "members/"

_PATIENCE_S = 2.0
"""How long members of the cluster are asked in turn before a request fails."""

_RENEWAL_S = 1.0
"""How long one member may take to renew a lease: others must still be asked before it ends."""

_PAUSE_S = 0.05
_CROWD_S = 0.1
"""How long an agent waits at most, at random, when another one was faster."""


_Keys = dict[str, KeyValue]


class _StateRecord(msgspec.Struct, array_like=True, frozen=True):
    """The value of the state's key; other builds read only which build has written it."""

    build: str
    state: msgspec.Raw


class EtcdControl:
    """The way to the state of one job in etcd; see `Control`.

    Args:
        options: Where etcd is.
        job: The job's name.
        patience_s: How long to look for a member that answers.

    Raises:
        StoreTimeout: No member answers.
        StoreRefused: The name, the password or a certificate is wrong.
    """

    def __init__(self, options: EtcdOptions, job: str, patience_s: float) -> None:
        self._gateway = Gateway(options)
        self._root = f"/dure/{job}/"
        self._prefix = f"{self._root}control/"
        self._asking, self._watching = self._gateway.connection(), self._gateway.connection()
        self._streaming = self._gateway.connection()
        self._closed = threading.Event()
        self._lease = 0
        self._changes: Iterator[int] | None = None  # of these keys; the watching thread's
        try:
            self._read(self._asking, patience_s)
        except StoreLost as error:
            raise StoreTimeout(f"{self._gateway} cannot be reached", seen=error.seen) from None

    def ask(self, message: Message, timeout_s: float = 0.0) -> Answer:
        match message:
            case JoinRequest():
                return self._join(message)
            case Heartbeat():
                answer = self._renew()
                if isinstance(answer, Gone) or not message.events:
                    return answer
                return self._change(self._asking, message.agent, message.nonce, message.events)
            case WatchRequest():
                return self._watch(message, timeout_s)
            case LeaveRequest():
                lost = Lost(message.agent, message.why)
                answer = self._change(
                    self._asking, message.agent, message.nonce, (lost,), last=True
                )
                if isinstance(answer, Accepted) and self._lease:
                    self._request("lease/revoke", {"ID": str(self._lease)})
                return answer

    def has_ended(self) -> bool:
        return False  # there is no process whose end would be the job's

    def close(self) -> None:
        self._closed.set()
        self._streaming.shut_down()  # first: the watching thread may read
        for connection in (self._asking, self._watching, self._streaming):
            connection.close()

    def see_others_off(self, agent: str, limit_s: float, pause: Callable[[float], None]) -> None:
        """At the end of a job, its first agent waits for the others to leave, and clears all.

        Args:
            agent: This agent.
            limit_s: How long, at most.
            pause: Waits some seconds; an error of it ends the wait.
        """
        until = time.monotonic() + limit_s
        with contextlib.suppress(StoreError):
            while True:
                keys = self._read(self._asking)[1]
                state = _state_of(keys)
                if not isinstance(state, JobState) or state.phase is not JobPhase.OVER:
                    return
                if state.agents[:1] != (agent,):
                    return
                if not any(name.startswith(_MEMBERS) for name in keys):
                    self._request("kv/deleterange", range_below(self._root))
                    return
                if time.monotonic() > until:
                    return
                pause(_PAUSE_S)

    # --- the requests ----------------------------------------------------------------------------

    def _join(self, joining: JoinRequest) -> Answer:
        agent, former = joining.joined.agent, joining.former
        lease, until = 0, time.monotonic() + 5 * _PATIENCE_S
        while True:
            keys = self._read(self._asking)[1]
            state = _state_of(keys)
            if _MEMBERS + agent in keys and isinstance(state, JobState):
                self._lease = keys[_MEMBERS + agent].lease  # an earlier answer was lost
                return Admitted(state.settings)
            plan = state.plan if isinstance(state, JobState) else None
            if plan is not None and agent in plan.members:
                return Gone()  # its lease has ended since an earlier attempt
            members = [name for name in keys if name.startswith(_MEMBERS)]
            if isinstance(state, str):
                if members or former:
                    raise other_build(f"{state} there, {own_build()} here")
                state = None  # no host is left in that job
            living = state is not None and any(_MEMBERS + a in keys for a in state.agents)
            if state is not None and not former and (state.phase is JobPhase.OVER or not living):
                state = None
            steps: list[Json] = []
            if state is not None:
                if (refusal := why_other_flags(joining, state)) is not None:
                    return refusal
            elif former:
                return NoJob()
            else:
                state = joining.state(joining.settings.run_id or uuid.uuid4().hex)
            if former and _MEMBERS + former in keys:
                state.apply(Lost(former, "it was cut off, and has come back"))
                steps.append(delete(self._prefix + _MEMBERS + former))
            state.apply(joining.joined)
            settings = state.settings
            lease = lease or self._granted(settings.lease_s + settings.margin_s)
            steps.append(put(self._prefix + _MEMBERS + agent, joining.nonce, lease))
            with contextlib.suppress(StoreLost):
                if self._write(self._asking, state, [self._unchanged(_STATE, keys)], steps):
                    self._lease = lease
                    return Admitted(settings)
            if time.monotonic() > until:
                raise StoreTimeout(f"{self._gateway} did not answer", op="join", keys=())
            self._rest()

    def _change(
        self,
        connection: EtcdConnection,
        agent: str,
        nonce: bytes,
        events: tuple[Event, ...],
        *,
        last: bool = False,
    ) -> Answer:
        """Apply events of a member, which with `last` is none afterwards."""
        mine = _MEMBERS + agent
        while True:
            _, keys = self._read(connection)
            before, state = _state_of(keys), _state_of(keys)
            if mine not in keys or keys[mine].value != nonce or not isinstance(state, JobState):
                return Gone()
            for event in events:
                state.apply(event)
            steps = [delete(self._prefix + mine)] if last else []
            if state == before and not steps:
                return Accepted()
            expect = [self._unchanged(_STATE, keys), self._unchanged(mine, keys)]
            if self._write(connection, state, expect, steps):
                return Accepted()
            self._rest()

    def _renew(self) -> Answer:
        answer = self._request("lease/keepalive", {"ID": str(self._lease)}, _RENEWAL_S)
        if int(answer.get("result", {}).get("TTL", 0)) <= 0:
            return Gone()
        return Accepted()

    def _watch(self, watch: WatchRequest, timeout_s: float) -> Answer:
        """Wait for another state, or for a member's end; the watching thread's."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and not self._closed.is_set():
            revision, keys = self._read(self._watching)
            if (answer := self._view(watch, keys)) is not None:
                return answer
            try:
                if self._changes is None:
                    self._changes = self._streaming.events(range_below(self._prefix), revision + 1)
                while next(self._changes) <= revision:
                    pass
            except (Unanswered, StopIteration):
                self._changes = None
                self._rest()
        return Accepted()

    def _view(self, watch: WatchRequest, keys: _Keys) -> Answer | None:
        """Return what a member has not seen yet, if anything; give up members without keys."""
        state, mine = _state_of(keys), keys.get(_MEMBERS + watch.agent)
        if mine is None or mine.value != watch.nonce or not isinstance(state, JobState):
            return Gone()
        silent_s = state.settings.lease_s + state.settings.margin_s
        lost: list[Event] = [
            Lost(agent, f"nothing was heard of it for {silent_s:g} s")
            for agent in state.agents
            if _MEMBERS + agent not in keys
        ]
        if lost and state.phase is not JobPhase.OVER:
            self._rest()  # another agent may be faster
            self._change(self._watching, watch.agent, watch.nonce, tuple(lost))
        revision = keys[_STATE].revision
        return None if revision == watch.seen else View(revision, state.action(watch.agent))

    def _rest(self) -> None:
        self._closed.wait(random.uniform(0.0, _CROWD_S))

    # --- etcd ------------------------------------------------------------------------------------

    def _request(self, path: str, body: Json, answer_s: float = _PATIENCE_S) -> Json:
        return self._until_answered(lambda: self._asking.ask(path, body, answer_s), _PATIENCE_S)

    def _until_answered(self, ask: Callable[[], Json], patience_s: float) -> Json:
        """Ask one member after the other.

        Raises:
            StoreLost: None answered in time; the request may have been carried out or not.
        """
        until = time.monotonic() + patience_s
        while True:
            if self._closed.is_set():
                raise StoreLost(f"the connection to {self._gateway} was closed by this process")
            try:
                return ask()
            except Unanswered as error:
                if time.monotonic() > until:
                    raise StoreLost(f"{self._gateway} is lost", seen=str(error)) from None
                self._closed.wait(random.uniform(0.0, _PAUSE_S))

    def _read(
        self, connection: EtcdConnection, patience_s: float = _PATIENCE_S
    ) -> tuple[int, _Keys]:
        """Return the revision, and all keys of the job's control plane."""
        wanted = range_below(self._prefix)
        answer = self._until_answered(lambda: connection.ask("kv/range", wanted), patience_s)
        return int(answer["header"]["revision"]), keys_below(self._prefix, answer)

    def _write(
        self, connection: EtcdConnection, state: JobState, expect: list[Json], steps: list[Json]
    ) -> bool:
        """Write a state and carry out `steps` if all conditions hold; return whether they did."""
        record = pack(_StateRecord(str(own_build()), msgspec.Raw(pack(state))))
        body = {"compare": expect, "success": [put(self._prefix + _STATE, record), *steps]}
        try:
            return bool(connection.ask("kv/txn", body).get("succeeded"))
        except Unanswered:  # it may have been done: the caller reads again
            return False

    def _granted(self, ttl_s: float) -> int:
        """Return a new lease; one whose number was lost on the way ends by itself."""
        return int(self._request("lease/grant", {"TTL": str(math.ceil(ttl_s))})["ID"])

    def _unchanged(self, name: str, keys: _Keys) -> Json:
        """Return the condition that a key is as it was, or as absent, when `keys` were read."""
        return has_revision(self._prefix + name, keys[name].revision if name in keys else 0)


_read_record = msgspec.msgpack.Decoder(_StateRecord).decode
_read_state = msgspec.msgpack.Decoder(JobState | ElasticState).decode


def _state_of(keys: _Keys) -> JobState | str | None:
    """Return the state; the build that wrote it, if this one cannot read it; None if none has."""
    if _STATE not in keys:
        return None
    build = "an unknown build"
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        record = _read_record(keys[_STATE].value)
        build = record.build
        if build == str(own_build()):
            return _read_state(record.state)
    return build


class EtcdJobEndpoint:
    """The endpoint of a job whose state is in etcd; see `HostEndpoint` for its attributes.

    Args:
        spec: The job.
        signals: The pipe in which signals to the launcher arrive.

    Raises:
        UsageError: The addresses or the options make no sense.
    """

    name, coordinates = "etcd", False
    advice = "Check --rdzv-endpoint, and that a majority of etcd's members runs."

    def __init__(self, spec: JobSpec, signals: int) -> None:
        self._spec, self._signals = spec, signals
        assert spec.endpoint is not None
        assert spec.run_id is not None
        self._job = spec.run_id
        self._options = EtcdOptions.read(spec.endpoint, dict(spec.rdzv_conf))
        self.url = self._options.url(self._job)
        self.secret = self._options.password.encode()
        self.address, self.trouble = spec.local_addr or "", ""
        self.store = self._options.url(f"{self._job}/ranks-{uuid.uuid4().hex[:12]}")  # new keys
        self.job_key = mint().raw
        self._control: EtcdControl | None = None

    def reach(self, settings: Settings, *, first: bool) -> EtcdControl | None:
        """Try once to connect; None: no member of etcd answers."""
        if not self.address:
            hosts = [urlsplit(f"//{each}").hostname or "" for each in self._options.endpoints]
            self.address = next(filter(None, map(interface_to, hosts)), "")
        try:
            self._control = EtcdControl(self._options, self._job, _DIAL_S)
        except (StoreTimeout, StoreLost) as error:
            self.trouble = f" ({error.seen or error})"
            return None
        return self._control

    def see_others_off(self, agent: str, limit_s: float) -> None:
        """At the end of the job: its first agent waits for the others, and clears the keys.

        A signal that ends the job ends the wait, too; then the keys stay.
        """
        if self._control is not None:
            with contextlib.suppress(Interrupted):
                self._control.see_others_off(agent, limit_s, self._pause)

    def _pause(self, seconds: float) -> None:
        pause(self._spec.signals, self._signals, seconds)

    def close(self) -> None:
        """Do nothing: the member closes the connections."""
