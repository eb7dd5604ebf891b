"""How a host becomes a member of a job on several hosts, as often as it must.

A host finds the job's state and joins it (`Link.join`); when it has been given up, it does both
again under another name. Hosts come in any order, so it tries until the join timeout.

**The coordinator** (`HostEndpoint`) is the launcher on whose host the endpoint's address is, if no
other one coordinates there yet. It runs two servers, each with a thread of its own. The *control
server*, at the endpoint, has the job's state and the agents' leases; ranks never use it, so
renewals never queue behind their keys. Its key follows from the user's, the endpoint and the job's
name. The *ranks' server* is at another port of that address, and its key is random: the job's own,
which the coordinator hands out with the settings. A key that leaks from a rank opens one job.

With etcd no host coordinates (`etcd.EtcdJobEndpoint`): all find the same keys there.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from dure.errors import LaunchError, StoreError, StoreLost, StoreRefused, StoreTimeout
from dure.launch.agent.control import open_control
from dure.launch.agent.coordinator import Coordinator
from dure.launch.agent.events import Joined, Settings
from dure.launch.agent.membership import HostMember, HostMembership, LastWill, boottime
from dure.launch.agent.messages import Admitted, Control, JoinRequest, Refusal
from dure.launch.ranks.reaper import Reaper
from dure.launch.signals import Interrupted, pause
from dure.launch.spec import JobSpec
from dure.store.address import (
    await_name,
    interface_to,
    is_local,
    look_up_briefly,
    patience_for_names,
    resolve,
    resolve_shared,
)
from dure.store.key import JobKey, control_key, mint
from dure.store.listener import listen
from dure.store.server import StoreServer
from dure.store.silence import silence_s

if TYPE_CHECKING:
    from dure.launch.agent.etcd import EtcdJobEndpoint

__all__ = ["HostEndpoint", "Link"]

_PAUSE_S = 0.1
_DIAL_S, _LONGEST_DIAL_S = 0.5, 2.0
"""How long an attempt to reach the coordinator takes at first, and at most: the time doubles with
each failure. A connection needs five round trips. Ctrl-C waits for the end of an attempt."""

_REPORT_S = 3.0

_REJOIN_S = 60.0
"""How long an agent that was cut off looks for the others."""

_OUTCOME_S = 5.0
"""The same, of a job that ends with a host's loss: it can only learn how."""

_FAREWELL_S = 2.0
"""How much longer than a lease and its margin the coordinator waits for the others to read the end
of the job."""

_FAREWELL_PAUSE_S = 0.005

_UNKNOWN_S = 10.0
"""How long the endpoint's name may be unknown where names do not come and go with their hosts."""

_LEASE_S = 15
"""How long a lease lasts by default."""


def settings_of(spec: JobSpec) -> Settings:
    """Return the settings of a job that begins on several hosts, without its store."""
    return Settings(
        min_hosts=spec.nnodes[0],
        max_hosts=spec.nnodes[1],
        max_restarts=spec.max_restarts,
        join_timeout_s=spec.join_timeout_s,
        last_call_s=spec.last_call_s,
        min_ranks=spec.min_ranks,
        endpoint=spec.endpoint or "",
        run_id=spec.run_id or "",
        restart_delay_s=spec.longest_restart_delay_s,
        lease_s=spec.lease_s or silence_s(_LEASE_S),
    )


class Link:
    """How this host becomes a member of its job.

    Args:
        spec: The job.
        endpoint: Where its state is.
        reaper: Kills the ranks of this host past its deadline, or when this launcher dies.
        signals: The pipe in which signals to the launcher arrive.
        say: Called with a line for the user, while the others cannot be found.

    Threads:
        The agent's alone.
    """

    def __init__(
        self,
        spec: JobSpec,
        endpoint: HostEndpoint | EtcdJobEndpoint,
        reaper: Reaper,
        *,
        signals: int,
        say: Callable[[str], None],
    ) -> None:
        self.endpoint = endpoint
        self._spec, self._reaper = spec, reaper
        self._signals, self._say = signals, say
        self._member: HostMember | None = None
        self._unanswered: JoinRequest | None = None  # may have been carried out

    def join(self, host: str, port: int = 0) -> HostMember:
        """Find the job and become a member under a new name, the first time or again.

        Args:
            host: This host's name.
            port: A port that is kept here for rank 0.

        Raises:
            Interrupted: The user has interrupted the search.
            LaunchError: The job was not found in time.
            UsageError: The other hosts were started with other flags.
        """
        spec, former = self._spec, ""
        self._unanswered = None
        if self._member is not None:
            former = self._member.agent
            self._member.close()
            self._member = None
        limit_s = spec.join_timeout_s
        if former:
            continues = spec.max_restarts > 0 or spec.elastic or spec.keep_going
            limit_s = min(limit_s, _REJOIN_S if continues else _OUTCOME_S)
        settings = settings_of(spec)
        settings = replace(settings, store=self.endpoint.store, job_key=self.endpoint.job_key)
        start, reported = time.monotonic(), False
        while True:
            control = self.endpoint.reach(settings, first=not former)
            if control is not None and self._enter(control, host, port, settings, former):
                assert self._member is not None
                return self._member
            pause(spec.signals, self._signals, _PAUSE_S)
            waited_s = time.monotonic() - start
            if waited_s > _REPORT_S and not reported:
                reported = True
                self._say(
                    f"no answer from {spec.endpoint} yet{self.endpoint.trouble}; looking for "
                    f"{limit_s:g} s"
                )
            if waited_s >= limit_s:
                raise self._lost(waited_s) if former else self._unreachable(waited_s)

    def _enter(
        self, control: Control, host: str, port: int, settings: Settings, former: str
    ) -> bool:
        """Ask to become a member; False: there is no job here (yet).

        A request whose answer was lost is repeated under the same name: under another one, the job
        would count this host twice, and start a round with a member that does not exist.
        """
        joining = self._unanswered or self._request(host, port, settings, former)
        joined, sent = joining.joined, boottime()
        try:
            answer = control.ask(joining)
        except StoreRefused:
            control.close()
            raise
        except StoreError:
            control.close()
            self._unanswered = joining
            return False
        self._unanswered = None
        if not isinstance(answer, Admitted):
            control.close()
            if isinstance(answer, Refusal):
                raise answer.error()
            return False
        membership = HostMembership(joined, joining.nonce, answer.settings, sent)
        self._member = HostMember(control, membership, self._reaper.extend)
        will = LastWill(self.endpoint.url, self.endpoint.secret, joined.agent, joining.nonce)
        self._reaper.appoint(msgspec.msgpack.encode(will))
        return True

    def _request(self, host: str, port: int, settings: Settings, former: str) -> JoinRequest:
        """Return a request to become a member, under a new name."""
        spec, address = self._spec, self.endpoint.address
        joined = Joined(uuid.uuid4().hex[:12], host, spec.nproc, spec.node_rank, address, port)
        elastic = spec.elastic or spec.keep_going
        return JoinRequest(joined, secrets.token_bytes(16), settings, elastic, former)

    def _unreachable(self, waited_s: float) -> LaunchError:
        """Return the error for a host that has never found the job."""
        return LaunchError(
            f"{self.endpoint.name} cannot be reached",
            elapsed_s=waited_s,
            seen=f"no server of this job answers at {self._spec.endpoint}{self.endpoint.trouble}",
            fix=self.endpoint.advice,
        )

    def _lost(self, waited_s: float) -> LaunchError:
        return LaunchError(
            f"{self.endpoint.name} was lost",
            elapsed_s=waited_s,
            seen=f"no server answers at the endpoint {self._spec.endpoint} any more, so the ranks "
            "of this host were ended",
            fix="Start the job again on all hosts: it resumes from its last checkpoint. With "
            "--rdzv-backend etcd a job survives the loss of any host.",
        )

    def close(self) -> None:
        """Leave the job; the coordinator waits a little for the others to read its end."""
        member = self._member
        if member is not None:
            stayed = not member.gone
            member.leave()
            if stayed:
                lease_s = member.settings.lease_s + member.settings.margin_s
                self.endpoint.see_others_off(member.agent, lease_s + _FAREWELL_S)
            member.close()
        self.endpoint.close()


class HostEndpoint:
    """The endpoint of a job that one of its hosts coordinates.

    Args:
        spec: The job.
        key: The user's key.
        signals: As for `Link`, as is `say`.
        say: While the name of the endpoint's host is not known.

    Attributes:
        name: Its name in messages about its loss.
        advice: For a host that does not find the job.
        address: Of this host, by which the job's other hosts reach it.
        secret: The key to the job's state.
        trouble: Why this host does not coordinate although the endpoint is its own.
        store: The ranks' store of a job that a joining host begins: none does.
        job_key: The key to that.

    Raises:
        StoreError: The endpoint is a wildcard, or no address.
    """

    name, store, job_key = "the job's coordinator", "", b""
    advice = (
        "Check that `dure run` runs on that host with the same endpoint, that no other program has "
        "the port (`ss -ltnp`), and that no firewall is between."
    )

    def __init__(
        self,
        spec: JobSpec,
        key: JobKey,
        *,
        signals: int,
        say: Callable[[str], None],
    ) -> None:
        assert spec.endpoint is not None
        self._spec, self._signals = spec, signals
        self._key = control_key(key, spec.endpoint, spec.run_id or "")
        self.secret = self._key.raw
        host, _, port = spec.endpoint.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._coordinator: Coordinator | None = None  # if this launcher coordinates
        self._servers: list[StoreServer] = []
        self.trouble = self.address = ""
        self._dial_s = _DIAL_S
        patience_s = patience_for_names(spec.join_timeout_s, _UNKNOWN_S)
        await_name(
            self._host, patience_s, say, lambda seconds: pause(spec.signals, signals, seconds)
        )
        self._there = resolve_shared(self._host, self._port, "the endpoint's host")

    @property
    def url(self) -> str:
        """The address of the job's state, for `open_control`."""
        return self._there.endpoint

    @property
    def coordinates(self) -> bool:
        """Whether the other agents depend on this launcher."""
        return self._coordinator is not None

    def reach(self, settings: Settings, *, first: bool) -> Control | None:
        """Try once to connect; None: no server answers.

        Args:
            settings: Of the job, which this host begins if it coordinates.
            first: Whether this host joins the job for the first time.
        """
        self._there = there = look_up_briefly(self._host, self._port) or self._there
        if first and not self.coordinates and self._may_coordinate():
            self._coordinate(settings)
        self.address = there.ip if self.coordinates else self._own_address() or ""
        if not self.address:  # the interface is down
            return None
        try:
            control = open_control(there.endpoint, self.secret, self._dial_s)
        except (StoreTimeout, StoreLost):
            self._dial_s = min(2 * self._dial_s, _LONGEST_DIAL_S)
            return None
        except StoreRefused as error:
            if self.trouble and error.foreign:
                return None
            error.advise(
                "If another job has this port, use another one. Agents of one job have the same "
                "--rdzv-id, and --rdzv-endpoint in the same spelling."
            )
            raise
        self.trouble = ""  # the port's owner is the coordinator
        return control

    def _may_coordinate(self) -> bool:
        """Whether this host is the one whose address the endpoint is."""
        return is_local(self._there.ip) if self._spec.serves is None else self._spec.serves

    def _coordinate(self, settings: Settings) -> None:
        """Run the two servers, if the port can be had."""
        try:
            listener = listen(self._there)
        except StoreError as error:  # taken: another agent of this host was first
            why = error.seen or error
            self.trouble = f" (port {self._port} of this host cannot be used: {why})"
            return
        job_key = mint()
        ranks = StoreServer(listen(resolve(self._there.ip, 0)), job_key)
        store = replace(self._there, port=ranks.port).endpoint.removeprefix("tcp://")
        settings = replace(settings, store=store, job_key=job_key.raw)
        elastic = self._spec.elastic or self._spec.keep_going
        first = JoinRequest(Joined("", "", 0), b"", settings, elastic)
        state = first.state(settings.run_id or uuid.uuid4().hex)
        self._coordinator = Coordinator(state, secrets.token_bytes(8))
        self._servers = [StoreServer(listener, self._key, board=self._coordinator), ranks]

    def _own_address(self) -> str | None:
        """Return the address of this host from which the endpoint is reached."""
        if self._spec.local_addr is not None:
            return resolve(self._spec.local_addr, 0, "the local address").ip
        return interface_to(self._there.ip)

    def see_others_off(self, agent: str, limit_s: float) -> None:
        """At the end of the job: wait until the other agents have read it, and left.

        A signal that ends the job ends the wait, too.
        """
        if self._coordinator is None:
            return
        until = time.monotonic() + limit_s
        with contextlib.suppress(Interrupted):
            while not self._coordinator.is_left.is_set() and time.monotonic() < until:
                pause(self._spec.signals, self._signals, _FAREWELL_PAUSE_S)

    def close(self) -> None:
        """Stop the servers, if this launcher runs them."""
        for server in self._servers:
            server.stop()
