"""How an agent becomes a member of its job: alone, or by finding the others, as often as it must.

A job on one host has no lease and no deadline (`Alone`): its state is fed directly, without threads
or round trips. On several hosts an agent finds the job's state and becomes a `Member`; when it has
been given up, it does both again under another name.

**Who coordinates** (`EndpointLink`): the launcher on whose host the endpoint's address is, if
nobody does there yet. It runs two servers, each with a thread of its own. The *control server*, at
the endpoint, has the job's state and the agents' leases; ranks never come there, so renewals never
queue behind their keys. Its key follows from the user's, the endpoint and the job's name. The
*ranks' server* is at another port of that address, and its key is random: the job's own, which the
coordinator hands out in the state. What leaks from a rank opens one job. Everybody else dials until
the join timeout, for hosts come in any order.

With etcd nobody coordinates (`EtcdLink`): everybody finds the same keys there.
"""

from __future__ import annotations

import select
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

import msgspec

from dure import env
from dure.errors import LaunchError, StoreError, StoreLost, StoreRefused, StoreTimeout
from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import Event, Joined, Settings
from dure.launch.agent.machine import Machine, Phase
from dure.launch.agent.membership import LastWill, Member, open_shared
from dure.launch.ranks.environment import MASTER_ADDR
from dure.launch.ranks.reaper import Reaper
from dure.launch.spec import JobSpec
from dure.store.address import (
    LOOPBACK,
    await_name,
    interface_to,
    is_local,
    look_up_briefly,
    patience_for_names,
    resolve,
    why_unreachable,
)
from dure.store.key import JobKey, control_key, mint
from dure.store.listener import listen
from dure.store.server import StoreServer
from dure.store.shared import Shared
from dure.store.silence import silence_s

__all__ = ["Alone", "EndpointLink", "EtcdLink", "Link", "OnlyMember"]

_PAUSE_S = 0.1
_DIAL_S = 0.5
_SAY_S = 3.0

_REJOIN_S = 60.0
"""How long an agent that was cut off looks for the others."""

_OUTCOME_S = 5.0
"""The same, of a job that ends with a host's loss: it can only learn how."""

_FAREWELL_S = 2.0
"""How much longer than a lease and its margin the coordinator waits for the others to read the end
of the job."""

_UNKNOWN_S = 10.0
"""How long the endpoint's name may be unknown where names do not come and go with their hosts."""

_TAKEN_S = 9.0
"""How much longer than a lease the endpoint's port on this host may be held by another
process than this job's coordinator: one that has ended frees it after its farewell, and another
program never."""


def _begun(spec: JobSpec) -> Machine:
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
            run_id=spec.run_id or "",
            lease_s=silence_s(),
        )
    )


# --- one host -------------------------------------------------------------------------------------


class OnlyMember:
    """The one member of a job on one host; as `Member`, without lease, deadline and news."""

    agent = "alone"
    address = MASTER_ADDR
    fd = -1
    expires_at = None
    gone = ""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

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
        machine = _begun(self._spec)
        machine.settings = replace(
            machine.settings,
            run_id=self._spec.run_id or uuid.uuid4().hex,
            store=f"{MASTER_ADDR}:{self._server.port}",
            job_key=self._key.raw,
        )
        machine.apply(Joined(OnlyMember.agent, host, self._spec.nproc, self._spec.node_rank))
        return OnlyMember(machine)

    def close(self) -> None:
        """Let the store end when the last rank has left it."""
        self._server.release()


# --- several hosts --------------------------------------------------------------------------------


class _Linked:
    """The link of a job on several hosts.

    Args:
        spec: The job; its `endpoint` says where the agents join.
        reaper: Who kills the ranks of this host past its deadline, or when this launcher dies.
        interrupted: A descriptor that becomes readable when the user has had enough.
        say: Called with a line for the user, while the others cannot be found.

    Threads: the agent's alone.
    """

    coordinates = False
    """Whether the other agents depend on this launcher's servers."""

    lost = "the job's coordinator"

    def __init__(
        self, spec: JobSpec, reaper: Reaper | None, interrupted: int, say: Callable[[str], None]
    ) -> None:
        self._spec, self._reaper = spec, reaper
        self._interrupted, self._say = interrupted, say
        self._member: Member | None = None
        self._start, self._said = time.monotonic(), False
        self._taken = ""  # why the endpoint's port cannot be had, though it is this host's
        self._address = ""  # of this host, by which the job's other hosts reach it
        self._endpoint, self._secret = "", b""  # as for `open_shared`

    def join(self, host: str) -> Member:
        """Find the job and become a member under a name that nobody had, the first time or again.

        Raises:
            LaunchError: Nobody was found in time, or the user had enough.
            UsageError: The others were told other things.
        """
        spec, former = self._spec, ""
        if self._member is not None:
            former = self._member.agent
            self._member.close()
            self._member = None
        limit_s = spec.join_timeout_s
        if former:
            goes_on = spec.max_restarts > 0 or spec.elastic or spec.keep_going
            limit_s = min(limit_s, _REJOIN_S if goes_on else _OUTCOME_S)
        self._start, self._said, self._taken = time.monotonic(), False, ""
        taken_s = silence_s() + _TAKEN_S
        while True:
            shared = self._reach(serve=not former)
            if shared is not None:
                member = Member(shared, self._renewed)
                if self._enter(member, host, former):
                    self._member = member
                    return member
            self._pause(_PAUSE_S)
            if self._waited_s > _SAY_S and not self._said:
                self._said = True
                self._say(f"nobody answers at {spec.endpoint} yet; looking for {limit_s:g} s")
            if self._waited_s >= (min(limit_s, taken_s) if self._taken else limit_s):
                raise self._lost_for_good() if former else self._nobody()

    def _enter(self, member: Member, host: str, former: str) -> bool:
        """Let a member join; False: there is no job here (yet)."""
        spec, mine = self._spec, _begun(self._spec)
        store, job_key = self._ranks_store()
        mine.settings = replace(mine.settings, store=store, job_key=job_key)
        joined = Joined(member.agent, host, spec.nproc, spec.node_rank, self._address)
        entered = False
        try:
            entered = member.join(joined, mine, begins=bool(store), former=former)
        except StoreError:
            pass
        finally:
            if not entered:
                member.close()
        if entered and self._reaper is not None:
            will = LastWill(self._endpoint, self._secret, member.agent, member.nonce)
            self._reaper.appoint(msgspec.msgpack.encode(will))
        return entered

    def _renewed(self, deadline: float) -> None:
        if self._reaper is not None:
            self._reaper.extend(deadline)

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._start

    def _pause(self, seconds: float) -> None:
        """Wait so long, or until the user has had enough."""
        if self._interrupted < 0:
            time.sleep(seconds)
        elif select.select([self._interrupted], [], [], seconds)[0]:
            raise LaunchError(
                "interrupted while looking for the job's other hosts", elapsed_s=self._waited_s
            )

    def _lost_for_good(self) -> LaunchError:
        return LaunchError(
            f"{self.lost} was lost",
            elapsed_s=self._waited_s,
            seen=f"nobody answers at the endpoint {self._spec.endpoint} any more, so the ranks of "
            "this host were ended",
            fix="Start the job again on all hosts: it goes on from its last checkpoint. With "
            "--rdzv-backend etcd a job outlives any host.",
        )

    def close(self) -> None:
        """Leave; somebody waits a little for the others to read the end, and then clears it."""
        member = self._member
        if member is not None:
            state = member.machine()
            waits = self._sees_others_off(state, member.agent) and not member.gone
            member.finish()
            lease_s = state.settings.lease_s + state.settings.margin_s
            if waits and member.others_left(lease_s + _FAREWELL_S):
                member.clear()
            member.close()

    # --- what differs ------------------------------------------------------------------------

    def _reach(self, *, serve: bool) -> Shared | None:
        """Try once to connect to the state; with `serve` offer it; None: nobody is there."""
        raise NotImplementedError

    def _ranks_store(self) -> tuple[str, bytes]:
        """Return a store for ranks, and its key; empty: who is here may not begin a job."""
        raise NotImplementedError

    def _nobody(self) -> LaunchError:
        """Return the error of one who has looked in vain."""
        raise NotImplementedError

    def _sees_others_off(self, state: Machine, agent: str) -> bool:
        """Whether it is this agent that waits for the others at the end."""
        raise NotImplementedError


class EndpointLink(_Linked):
    """The link of a job one of whose hosts coordinates.

    Args:
        spec: As for all of several hosts, as are `reaper`, `interrupted` and `say`.
        key: The user's key.

    Raises:
        StoreError: The endpoint, or DURE_STORE_BIND, is a wildcard, or no address.
    """

    def __init__(
        self,
        spec: JobSpec,
        key: JobKey,
        reaper: Reaper | None = None,
        *,
        interrupted: int = -1,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(spec, reaper, interrupted, say)
        assert spec.endpoint is not None
        self._key = control_key(key, spec.endpoint, spec.run_id or "")
        self._secret = self._key.raw
        host, _, port = spec.endpoint.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._servers: list[StoreServer] = []  # if this launcher coordinates
        self._store, self._job_key = "", mint()
        patience_s = patience_for_names(spec.join_timeout_s, _UNKNOWN_S)
        await_name(self._host, patience_s, say, self._pause)
        self._there = resolve(self._host, self._port, "the endpoint's host")
        if bind := env.text("DURE_STORE_BIND"):  # for ranks' own stores; a wildcard is refused here
            resolve(bind, 0, "DURE_STORE_BIND")

    @property
    def coordinates(self) -> bool:
        return bool(self._servers)

    def _reach(self, *, serve: bool) -> Shared | None:
        """Coordinate, if this host may, or dial.

        The endpoint's name is looked up again, for its host may have been replaced.
        """
        self._there = there = look_up_briefly(self._host, self._port) or self._there
        self._endpoint = there.endpoint
        if serve and not self.coordinates and self._may_coordinate():
            self._coordinate()
        self._address = there.ip if self.coordinates else self._own_address() or ""
        loopback = there.endpoint.startswith(LOOPBACK)
        why = why_unreachable(there.endpoint) if loopback else ""
        if not self._address or why:  # the interface is down
            if serve:
                seen = f"{self._spec.endpoint}: {why}" if why else str(self._spec.endpoint)
                raise LaunchError("there is no way to the endpoint", seen=seen)
            return None
        try:
            return open_shared(there.endpoint, self._secret, _DIAL_S)
        except (StoreTimeout, StoreLost):
            return None
        except StoreRefused as error:
            if self._taken and error.foreign:
                return None
            error.advise(
                "Agents of one job have the same --rdzv-endpoint, written alike, and --rdzv-id."
            )
            raise

    def _coordinate(self) -> None:
        """Run the two servers, if the port can be had."""
        try:
            self._servers = [StoreServer(listen(self._there), self._key, self._note_presence)]
        except StoreError as error:  # taken: another agent of this host was first
            self._taken = error.seen or str(error)
            return
        ranks = StoreServer(listen(resolve(self._there.ip, 0)), self._job_key)
        self._servers.append(ranks)
        address = replace(self._there, port=ranks.port)
        self._store = address.endpoint.removeprefix("tcp://")

    def _may_coordinate(self) -> bool:
        """Whether this host is the one whose address the endpoint is."""
        return is_local(self._there.ip) if self._spec.serves is None else self._spec.serves

    def _note_presence(self, key: str, there: bool) -> None:
        if self._member is not None:
            self._member.note_presence(key, there)

    def _own_address(self) -> str | None:
        """Return the address of this host from which the endpoint is reached."""
        if self._spec.local_addr is not None:
            return resolve(self._spec.local_addr, 0, "the local address").ip
        return interface_to(self._there.ip)

    def _ranks_store(self) -> tuple[str, bytes]:
        return (self._store, self._job_key.raw) if self.coordinates else ("", b"")

    def _nobody(self) -> LaunchError:
        if self._taken:
            return LaunchError(
                f"port {self._port} of this host is taken by another program",
                elapsed_s=self._waited_s,
                seen=f"{self._spec.endpoint}: {self._taken}, and no store of this job answers "
                "there",
                fix="Choose another port, on every host (`ss -ltnp` shows who has this one).",
            )
        return LaunchError(
            "the job's other hosts cannot be found",
            elapsed_s=self._waited_s,
            seen=f"nobody answers at the endpoint {self._spec.endpoint}",
            fix="Check that `dure run` runs on that host with the same endpoint, and that no "
            "firewall is between.",
        )

    def _sees_others_off(self, state: Machine, agent: str) -> bool:
        return self.coordinates

    def close(self) -> None:
        super().close()
        for server in self._servers:
            server.stop()


class EtcdLink(_Linked):
    """The link of a job whose state is in etcd.

    Args:
        spec: As for all of several hosts, as are `reaper`, `interrupted` and `say`.

    Raises:
        UsageError: The addresses or the options make no sense.
    """

    lost = "etcd"

    def __init__(
        self,
        spec: JobSpec,
        reaper: Reaper | None = None,
        *,
        interrupted: int = -1,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        from dure.store.etcd_gateway import EtcdOptions  # lazy: few jobs use it, it brings ssl

        super().__init__(spec, reaper, interrupted, say)
        assert spec.endpoint is not None
        assert spec.run_id is not None
        self._options = EtcdOptions.read(spec.endpoint, dict(spec.rdzv_conf))
        self._endpoint = self._options.url(spec.run_id)
        self._secret = self._options.password.encode()
        self._address = spec.local_addr or ""
        self._why = ""

    def _reach(self, *, serve: bool) -> Shared | None:
        if not self._address:
            hosts = [urlsplit(f"//{each}").hostname or "" for each in self._options.endpoints]
            self._address = next(filter(None, map(interface_to, hosts)), "")
        try:
            return open_shared(self._endpoint, self._secret, _DIAL_S)
        except (StoreTimeout, StoreLost) as error:
            self._why = error.seen or str(error)
            return None

    def _ranks_store(self) -> tuple[str, bytes]:
        """Return keys that nobody has used before."""
        url = self._options.url(f"{self._spec.run_id}/ranks-{uuid.uuid4().hex[:12]}")
        return url, mint().raw

    def _nobody(self) -> LaunchError:
        return LaunchError(
            "etcd cannot be reached",
            elapsed_s=self._waited_s,
            seen=f"{','.join(self._options.endpoints)}: {self._why or 'no answer'}",
            fix="Check --rdzv-endpoint, and that a majority of etcd's members runs.",
        )

    def _sees_others_off(self, state: Machine, agent: str) -> bool:
        return state.phase is Phase.OVER and state.agents[:1] == (agent,)


Link = Alone | EndpointLink | EtcdLink
