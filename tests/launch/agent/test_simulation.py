"""Jobs on simulated hosts: a virtual clock, one thread, and a network that loses messages.

The coordinator (`Coordinator`) and its agents' state (`HostMembership`) are the real ones, with
all messages packed and read back. Hosts, ranks, reapers and the network between are simulated here.
After every event the rules of a job are checked (`World.check`).

A message may be late; it may be lost, or its answer, and then the connection breaks and the request
is put again through another one; and the lost one may arrive after all, long after. A host may be
cut off, its launcher stopped, or killed; the coordinator may be paused.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from dure.launch.agent.coordinator import Coordinator
from dure.launch.agent.events import (
    Ended,
    Event,
    Expired,
    Failed,
    Finished,
    Idle,
    JobOutcome,
    Joined,
    Leave,
    Left,
    Rejoin,
    RunRound,
    Settings,
    Stop,
)
from dure.launch.agent.membership import HostMembership
from dure.launch.agent.messages import (
    Admitted,
    Answer,
    JoinRequest,
    LeaveRequest,
    Message,
    pack,
    read_answer,
)
from dure.launch.agent.state import JobPhase
from dure.launch.spec import Exit, RankResult
from dure.store.wire import StoreRequest

SEEDS = range(12)
SIZES = (2, 3, 8, 40)
WATCH_S = 60.0


@dataclass(kw_only=True)
class Faults:
    """How bad the network is, and how many ranks die.

    Args:
        loss: The part of the messages that are lost.
        late_s: How long a message takes at most.
        deaths: How many ranks fail, one after the other.
    """

    loss: float = 0.0
    late_s: float = 0.05
    deaths: int = 0


@dataclass
class Ranks:
    """The ranks of one host in one round; here each host has one."""

    agent: str
    number: int
    times: int = 0
    alive: bool = True
    outcome: str = ""


@dataclass
class Host:
    """One host: its launcher, its reaper and its rank.

    Attributes:
        cut_until: The network is cut so long.
        stopped_until: The launcher is stopped so long.
        killed: The launcher was killed.
        leaves: The launcher got SIGTERM.
        outcome: How the job ended for it.
        tries: How often it has tried to join again.
    """

    world: World
    name: str
    cut_until: float = 0.0
    stopped_until: float = 0.0
    killed: bool = False
    leaves: bool = False
    outcome: JobOutcome | None = None
    member: HostMembership | None = None
    ranks: Ranks | None = None
    tries: int = -1
    names: list[str] = field(default_factory=list[str])
    busy: set[str] = field(default_factory=set[str])
    reported: set[object] = field(default_factory=set[object])

    # --- the launcher ----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self.killed or self.outcome is not None or self.world.has_ended

    def run(self) -> None:
        """Do what there is to do now."""
        world = self.world
        if self.idle:
            return
        if world.now < self.stopped_until:
            world.at(self.stopped_until, self.run)
        elif self.member is None:
            self._join()
        elif self.member.gone(world.now):
            self._end_ranks()
            self.member, self.busy = None, set()
            world.after(0.1, self.run)
        else:
            self._act(self.member)
            if self.member is not None and not self.idle:
                self._send(self.member)

    def _join(self) -> None:
        if "join" in self.busy:
            return
        self.busy.add("join")
        self.tries += 1  # a name for each try, as the link draws an id for each
        agent = f"{self.name}.{self.tries}"
        former = self.names[-1] if self.names else ""
        joined = Joined(agent, self.name, 1)
        joining = JoinRequest(
            joined, agent.encode(), self.world.settings, self.world.elastic, former
        )
        sent = self.world.now

        def answered(answer: Answer) -> None:
            self.busy.discard("join")
            if not isinstance(answer, Admitted):
                self.world.after(0.2, self.run)
                return
            self.names.append(agent)
            self.member = HostMembership(joined, agent.encode(), answer.settings, sent)
            self._extended(self.member.deadline)

        self.world.ask(self, f"{agent} join", joining, answered, 0.0)

    def _send(self, member: HostMembership) -> None:
        world = self.world
        if "watch" not in self.busy:
            self.busy.add("watch")

            def seen(answer: Answer) -> None:
                if member is self.member:
                    self.busy.discard("watch")
                    member.watched(answer)

            world.ask(self, f"{member.agent} watch", member.next_watch(), seen, WATCH_S)
        if "send" not in self.busy:
            request, sent = member.next_request(world.now), world.now
            if request is None:
                world.at(member.wake_at(world.now), self.run)
                return
            self.busy.add("send")

            def answered(answer: Answer) -> None:
                if member is self.member:
                    self.busy.discard("send")
                    member.answered(request, answer, sent, world.now)
                    self._extended(member.deadline)

            world.ask(self, f"{member.agent} send", request, answered, 0.0)

    def _extended(self, deadline: float) -> None:
        def reap() -> None:  # also if the launcher is stopped
            if self.member is None or self.member.deadline <= self.world.now:
                self._end_ranks()

        self.world.at(deadline, reap)

    def _tell(self, key: object, event: Event) -> None:
        """Report an event once."""
        assert self.member is not None
        if (self.member.agent, key) not in self.reported:
            self.reported.add((self.member.agent, key))
            self.member.report(event)

    # --- its actions -----------------------------------------------------------------------------

    def _act(self, member: HostMembership) -> None:
        agent, world, action = member.agent, self.world, member.view.action
        if self.leaves:
            self._tell("left", Left(agent, 143))
            if self.ranks is not None and self.ranks.agent == agent:
                self._stop(agent, self.ranks.number)
        self._report(member)
        match action:
            case Idle(timer=""):
                pass
            case Idle():
                due = world.timers.setdefault((agent, action.timer), world.now + action.after_s)
                if world.now >= due:
                    self._tell(("expired", action.timer), Expired(action.timer))
                else:
                    world.at(due, self.run)
            case RunRound():
                self._work(action)
            case Stop():
                self._stop(agent, action.round)
            case Leave():
                self.outcome = action.outcome
                self._end_ranks()
                world.ask(
                    self, f"{agent} leave", LeaveRequest(agent, member.nonce), lambda _: None, 0.0
                )
            case Rejoin():
                assert self.leaves and not (self.ranks and self.ranks.alive)
                self.outcome = JobOutcome(code=143)

    def _work(self, action: RunRound) -> None:
        number = action.round.number
        assert self.member is not None
        if self.leaves or (self.member.agent, ("ended", number)) in self.reported:
            return
        agent = self.member.agent
        if self.ranks is None or (self.ranks.agent, self.ranks.number) != (agent, number):
            self._start(Ranks(agent, number))
        for due in action.replaced:
            if due.times > self.ranks_now.times and not self.ranks_now.alive:
                self._start(Ranks(agent, number, due.times))

    @property
    def ranks_now(self) -> Ranks:
        assert self.ranks is not None
        return self.ranks

    def _start(self, ranks: Ranks) -> None:
        assert self.ranks is None or not self.ranks.alive, f"{self.name} has two ranks"
        self.ranks = ranks
        world = self.world

        def end() -> None:
            if (
                ranks.alive
                and world.elastic
                and world.deaths_left == 0
                and world.awaits_replacement
            ):
                world.after(1.0, end)
            elif ranks.alive:
                ranks.alive = False
                ranks.outcome = "well" if world.deaths_left == 0 else "failed"
                world.deaths_left -= ranks.outcome == "failed"
                world.died += ranks.outcome == "failed"
                self.run()

        world.after(world.draw.uniform(1.0, 4.0), end)

    def _report(self, member: HostMembership) -> None:
        """Report how the rank has ended."""
        ranks, agent = self.ranks, member.agent
        if ranks is None or ranks.alive or not ranks.outcome or ranks.agent != agent:
            return
        number, times = ranks.number, ranks.times
        result = RankResult(
            rank=self.world.hosts.index(self),
            host=self.name,
            pid=times,
            exit=Exit(code=int(ranks.outcome != "well")),
        )
        if ranks.outcome == "failed":
            self._tell(("failed", number, times), Failed(agent, number, 0, result, times))
        elif self.world.elastic:
            self._tell(("finished", number), Finished(agent, number, 0))
        else:
            self._tell(("ended", number), Ended(agent, number, (result,), well=True))

    def _stop(self, agent: str, number: int) -> None:
        if ("stopping", agent, number) in self.reported:
            return
        self.reported.add(("stopping", agent, number))

        def ended() -> None:
            if self.ranks is not None and self.ranks.number == number:
                self.ranks.alive = False
            if self.member is not None and self.member.agent == agent:
                self._tell(("ended", number), Ended(agent, number))
                self.run()

        self.world.after(self.world.draw.uniform(0.0, 3.0), ended)

    def _end_ranks(self) -> None:
        if self.ranks is not None:
            self.ranks.alive = False

    def kill(self) -> None:
        """Kill the launcher: its reaper ends the ranks, and reports that."""
        if self.idle:
            return
        self.killed, member = True, self.member

        def reaped() -> None:
            self._end_ranks()
            if member is not None:
                will = LeaveRequest(member.agent, member.nonce, "its launcher was killed")
                self.world.ask(self, f"{member.agent} will", will, lambda _: None, 0.0)

        self.world.break_connections(self)
        self.world.after(self.world.draw.uniform(0.05, 0.5), reaped)


class Checked(Coordinator):
    """A coordinator that checks what it holds true of its state, in jobs of few hosts."""

    def _apply(self, event: Event) -> None:
        state = self.state
        if len(state.agents) > 8:
            return super()._apply(event)
        outline, actions = state.outline, {agent: state.action(agent) for agent in state.agents}
        super()._apply(event)
        if state.outline == outline and not isinstance(event, Expired):
            others = actions.keys() & set(state.agents) - {event.agent}
            assert all(state.action(other) == actions[other] for other in others)
        before = msgspec.msgpack.decode(pack(state), type=type(state))  # as with etcd
        state.apply(event)  # its sender does not know that it has arrived
        assert state == before


@dataclass
class Call:
    """A request that has no answer yet."""

    host: Host
    line: str
    message: Message
    answered: Callable[[Answer], None]
    timeout_s: float


class World:
    """All hosts, the coordinator, the network and the clock.

    Args:
        seed: Decides everything.
        count: How many hosts there are.
        faults: Of the network and the ranks.
        elastic: The kind of the job.
        settings: Of the job, as they differ from the usual ones.
    """

    def __init__(
        self, seed: int, count: int, faults: Faults, *, elastic: bool = False, **settings: float
    ) -> None:
        self.draw, self.faults, self.elastic = random.Random(seed), faults, elastic
        wanted = {
            "min_hosts": count,
            "max_hosts": count,
            "max_restarts": 99,
            "lease_s": 10.0,
        } | settings
        self.settings = Settings(run_id="job", **wanted)  # pyright: ignore[reportArgumentType]
        self.now = 0.0
        joining = JoinRequest(Joined("", "", 0), b"", self.settings, elastic)
        self.coordinator = Checked(joining.state("job"))
        self.deaths_left, self.died = faults.deaths, 0
        self.timers: dict[tuple[str, str], float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._calls: dict[bytes, Call] = {}  # by connection
        self._connections: dict[str, bytes] = {}
        self._numbers = itertools.count()
        self._paused_s = self._paused_until = 0.0
        self._tick_at = float("inf")
        self.hosts = [Host(self, f"h{number}") for number in range(count)]  # 0 coordinates
        for host in self.hosts:
            self.after(self.draw.uniform(0.0, 1.0), host.run)

    @property
    def awaits_replacement(self) -> bool:
        """Whether a rank has failed on a host that is a member, and is not replaced yet."""
        return any(
            host.ranks is not None
            and host.ranks.outcome == "failed"
            and host.member is not None
            and host.member.agent == host.ranks.agent
            and not host.idle
            for host in self.hosts
        )

    # --- time ------------------------------------------------------------------------------------

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), do))

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something later."""
        self.at(self.now + seconds, do)

    def run(self, limit_s: float = 600.0) -> None:
        """Run until all launchers have ended."""
        while not all(host.idle for host in self.hosts):
            self.now, _, do = heapq.heappop(self._events)
            assert self.now < limit_s, f"not over: {self.coordinator.state}"
            do()
            self.check()

    # --- the coordinator -------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether the launcher of host 0, which coordinates, has ended: all others have left it."""
        return self.hosts[0].outcome is not None and self.coordinator.is_left.is_set()

    @property
    def _clock(self) -> float:
        """The coordinator's clock, which stands still while it is paused."""
        return self.now - self._paused_s

    def pause(self, seconds: float) -> None:
        """Stop the coordinator for a while."""
        if self.now >= self._paused_until:
            self._paused_until = self.now + seconds

            def resume() -> None:
                self._paused_s += seconds

            self.at(self._paused_until, resume)

    def _deliver(self, connection: bytes, message: Message, timeout_s: float, host: Host) -> None:
        if self.now < self._paused_until:
            self.at(
                self._paused_until + 0.001,
                lambda: self._deliver(connection, message, timeout_s, host),
            )
            return
        packed = pack(message)
        request = StoreRequest("control", values=(packed,), timeout_s=timeout_s)
        answers = self.coordinator.handle(connection, request, self._clock)
        self._answer([*answers, *self.coordinator.expire(self._clock)])

    def _answer(self, answers: list[tuple[bytes, object]]) -> None:
        for connection, reply in answers:
            packed = reply.values[0]  # pyright: ignore
            call = self._calls.get(connection)
            if call is not None:
                self._return(connection, call, read_answer(packed))
        due = self.coordinator.next_deadline()
        at = float("inf") if due is None else due + self._paused_s + 0.001
        if at < self._tick_at:
            self._tick_at = at
            self.at(self._tick_at, self._tick)

    def _tick(self) -> None:
        if self.now < self._paused_until:
            self.at(self._paused_until + 0.001, self._tick)
            return
        self._tick_at = float("inf")
        self._answer(list(self.coordinator.expire(self._clock)))

    def _leave(self, connection: bytes) -> None:
        self.coordinator.leave(connection)
        self._answer(list(self.coordinator.expire(self._clock)))

    # --- the network -----------------------------------------------------------------------------

    def ask(
        self,
        host: Host,
        line: str,
        message: Message,
        answered: Callable[[Answer], None],
        timeout_s: float,
    ) -> None:
        """Put a request through a connection; `answered` is called once, unless all is over."""
        connection = self._connections.setdefault(line, f"{line} {next(self._numbers)}".encode())
        call = self._calls[connection] = Call(host, line, message, answered, timeout_s)
        lost = self.draw.random() < self.faults.loss or self.now < host.cut_until
        delay_s = self.draw.uniform(0.0, self.faults.late_s)
        if lost:
            self._break(connection, call)
            if self.draw.random() < 0.5 and self.now >= host.cut_until:  # it comes, but late
                delay_s += self.draw.uniform(0.0, 20.0)
                self.after(delay_s, lambda: self._deliver(connection, message, timeout_s, host))
            return
        self.after(delay_s, lambda: self._deliver(connection, message, timeout_s, host))

    def _return(self, connection: bytes, call: Call, answer: Answer) -> None:
        host = call.host
        if self.draw.random() < self.faults.loss or self.now < host.cut_until:
            self._break(connection, call)
            return

        def arrive() -> None:
            if self._calls.get(connection) is not call or self.now < host.cut_until:
                return self._break(connection, call)
            if self.now < host.stopped_until:
                return self.at(host.stopped_until, arrive)
            del self._calls[connection]
            call.answered(answer)
            host.run()

        self.after(self.draw.uniform(0.0, self.faults.late_s), arrive)

    def _break(self, connection: bytes, call: Call) -> None:
        """Break a connection; both sides notice it sooner or later, and the client asks again."""
        if self._calls.pop(connection, None) is None:
            return
        if self._connections.get(call.line) == connection:
            del self._connections[call.line]
        self.after(self.draw.uniform(0.0, 3.0), lambda: self._leave(connection))

        def again() -> None:
            over = call.host.killed and not call.line.endswith("will")
            if not over and not self.has_ended:
                self.ask(call.host, call.line, call.message, call.answered, call.timeout_s)

        self.after(self.draw.uniform(0.2, 1.0), again)

    def break_connections(self, host: Host) -> None:
        """Close the connections of a launcher that has died; the kernel does that at once."""
        for line, connection in list(self._connections.items()):
            if line.partition(".")[0] == host.name:
                del self._connections[line]
                self._calls.pop(connection, None)
                self.after(
                    self.draw.uniform(0.0, self.faults.late_s), lambda c=connection: self._leave(c)
                )

    # --- rules -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Check what must hold at all times.

        Ranks of two rounds never run at the same time. A host that has been given up has no ranks.
        """
        state = self.coordinator.state
        running = {host.name: host.ranks for host in self.hosts if host.ranks and host.ranks.alive}
        numbers = {ranks.number for ranks in running.values()}
        assert len(numbers) <= 1, f"rounds {numbers} at once"
        here = {agent.partition(".")[0] for agent in state.agents}
        if state.phase is not JobPhase.OVER:
            assert running.keys() <= here, f"{running.keys() - here} were given up, and have ranks"


# --- the tests -----------------------------------------------------------------------------------

HISTORIES = [*itertools.product(SEEDS, SIZES), (0, 200)]


def outcome_of(world: World) -> int:
    """Run a job; return its exit code, which is the same on all hosts that have one."""
    world.run()
    codes = {host.outcome.code for host in world.hosts if host.outcome and not host.leaves}
    assert len(codes) == 1, codes
    return codes.pop()


@pytest.mark.parametrize("elastic", [False, True], ids=["rounds", "elastic"])
@pytest.mark.parametrize(("seed", "count"), HISTORIES)
def test_each_death_counts_once_although_messages_are_lost_late_and_doubled(
    seed: int, count: int, elastic: bool
) -> None:
    faults = Faults(loss=0.05, late_s=0.3, deaths=3)
    world = World(seed, count, faults, elastic=elastic, lease_s=60.0)
    assert outcome_of(world) == 0
    state = world.coordinator.state
    assert world.died == 3
    if elastic:
        assert state.restarts == 3
    else:  # ranks that die in the same round cost one restart, and so does a lost connection
        assert 1 <= state.restarts == state.plan.number <= 3


@pytest.mark.parametrize("elastic", [False, True], ids=["rounds", "elastic"])
@pytest.mark.parametrize(("seed", "count"), HISTORIES)
def test_deaths_stops_cuts_and_a_slow_coordinator_never_let_two_rounds_run(
    seed: int, count: int, elastic: bool
) -> None:
    """`World.check` looks at every moment; here all must come to an end, and to the same one."""
    faults, most = Faults(loss=0.02, late_s=0.2, deaths=2), max(1, count - seed % 2)  # or a spare
    world = World(seed, count, faults, elastic=elastic, min_hosts=1, max_hosts=most)
    draw = world.draw
    for host in draw.sample(world.hosts[1:], min(count - 1, 5)):
        start, long_s = draw.uniform(0.0, 20.0), draw.choice([0.5, 5.0, 9.0, 13.0, 30.0])
        what = draw.choice(["cut", "stop", "kill", "leave"])

        def spoil(host=host, what=what, long_s=long_s) -> None:
            if what == "kill":
                host.kill()
            elif what == "leave":
                host.leaves = True
                host.run()
            elif what == "cut":
                host.cut_until = world.now + long_s
            else:
                host.stopped_until = world.now + long_s

        world.at(start, spoil)
    longest_s = 8.0 if elastic else 20.0  # longer than a lease: then all hosts are given up
    for start in (5.0, 15.0):
        pause_s = draw.choice([1.0, longest_s])
        world.at(draw.uniform(0.0, start), lambda pause_s=pause_s: world.pause(pause_s))
    assert outcome_of(world) == 0
