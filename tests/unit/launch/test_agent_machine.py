"""The machine that decides on rounds: thousands of random histories, and a few told by hand.

The histories are made of what can happen to real agents: they join, leave, are lost, their workers
fail or succeed, and they do what their duty says, in any order and late. After each event the
rules that must always hold are checked.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.launch.agent.elastic import ElasticMachine
from dure.launch.agent.events import (
    Ended,
    Event,
    Expired,
    Failed,
    Finished,
    Joined,
    Leave,
    Left,
    Lost,
    Missing,
    Plan,
    Prepare,
    Ready,
    Refused,
    Rejoin,
    Settings,
    Stop,
    Wait,
    Work,
)
from dure.launch.agent.machine import Machine, Phase
from dure.launch.spec import Crash, Exit, RankResult

Make = Callable[[Settings], Machine]


def failed(
    agent: str,
    round: int,
    local: int,
    rank: int,
    *,
    code: int = 3,
    peer: int | None = None,
    times: int = 0,
) -> Failed:
    crash = Crash(type="PeerLost", message="", traceback="", exit_code=code, peer=peer)
    worker = RankResult(
        rank=rank,
        host=f"host-{agent}",
        pid=1000 + rank,
        exit=Exit(code=code),
        crash=None if peer is None else crash,
    )
    return Failed(agent, round, local, worker, times)


def copy(machine: Machine) -> Machine:
    """Return what another agent reads of what one has written."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(machine), type=type(machine))


class World:
    """Agents that obey one machine, and a fate that draws what happens to them next."""

    def __init__(self, machine: Machine, draw: random.Random) -> None:
        self.machine, self.draw = machine, draw
        self.log: list[Event] = []
        self.born = 0
        self.here: list[str] = []
        self.running: dict[str, int] = {}  # agent to the round whose workers it has
        self.harmed = False  # a worker failed in this round, or a host of it was lost
        self.done: set[str] = set()  # members of whose workers nothing is left
        self.leaving: set[str] = set()
        self.ready: Ready | None = None

    def tell(self, event: Event) -> None:
        before = copy(self.machine)
        self.log.append(event)
        self.note(event)
        self.machine.apply(event)
        again = copy(self.machine)
        again.apply(event)  # of one who does not know that it has arrived
        assert again == self.machine
        self.check()
        if not isinstance(self.machine, ElasticMachine):
            self.check_step(before)
            self.check_duties()

    def note(self, event: Event) -> None:
        """Follow what happens to the present round, from the events alone."""
        machine, plan = self.machine, self.machine.plan
        if plan is None or machine.phase is Phase.OVER:
            return
        match event:
            case Ready():
                if event.round == plan.number:
                    self.ready = self.ready or event
            case Failed():
                self.harmed |= event.round == plan.number and machine._dismissed is None
            case Ended():
                if event.round == plan.number:
                    self.done.add(event.agent)
            case Missing():
                works = event.agent in machine.agents and event.agent in plan.members
                works = works and event.agent not in self.done
                self.harmed |= (
                    works and machine.phase is Phase.RUNNING and (event.round == plan.number)
                )
            case Lost() | Left():
                works = event.agent in machine.agents and event.agent in plan.members
                works = works and event.agent not in self.done
                works = works and machine.phase in (Phase.RUNNING, Phase.STOPPING)
                if isinstance(event, Left):
                    self.leaving |= {event.agent} if works else set()
                else:
                    self.harmed |= works and event.agent not in self.leaving
            case _:
                pass

    def check_step(self, before: Machine) -> None:
        """Compare what an event has brought about with what had happened to the round."""
        machine = self.machine
        if before.phase is Phase.OVER:
            assert machine == before
            return
        began = machine.plan is not None and machine.plan != before.plan
        ran = before.phase in (Phase.RUNNING, Phase.STOPPING)
        closed = ran and (began or machine.phase in (Phase.GATHERING, Phase.OVER))
        over = machine.phase is Phase.OVER
        assert machine.restarts == before.restarts + (closed and self.harmed and not over)
        assert before.excluded == machine.excluded or machine.restarts > before.restarts
        assert closed or machine.setback == before.setback
        if closed and over:
            assert machine.outcome is not None
            if self.harmed:
                assert machine.outcome.code != 0 or machine._dismissed
                assert machine._dismissed or machine.restarts == machine.settings.max_restarts
            elif machine._dismissed is None:
                assert machine.outcome.code == 0
                assert before.plan is not None and set(before.plan.members) <= self.done
        if began:
            self.check_start(before)
            self.harmed, self.ready, self.done = False, None, set()
        else:
            assert machine.plan == before.plan
        if machine.phase is Phase.RUNNING:
            assert not self.harmed
        waits = machine.plan is not None and machine.phase is Phase.STOPPING
        if waits and machine.plan is not None:
            assert any(a in machine.agents and a not in self.done for a in machine.plan.members)

    def check_start(self, before: Machine) -> None:
        """Look at a round that has just begun."""
        machine, plan = self.machine, self.machine.plan
        assert plan is not None and not self.running, "two rounds run at once"
        assert plan.number == (0 if before.plan is None else before.plan.number + 1)
        joined = {a.agent: a for a in machine._agents.values()}
        assert plan.hosts == tuple(joined[a].host for a in plan.members)
        assert plan.nprocs == tuple(joined[a].nproc for a in plan.members)
        assert not machine.excluded & set(plan.machines)
        able = [a for a in machine._agents.values() if a.machine not in machine.excluded]
        fixed = {a.node_rank for a in able}
        if None in fixed:
            last = () if before.plan is None else before.plan.members
            stayed = [a for a in last if a in plan.members]
            assert list(plan.members[: len(stayed)]) == stayed
            assert len(plan.members) == min(len(able), machine.settings.max_hosts)
        else:
            numbers = [joined[a].node_rank for a in plan.members]
            assert numbers == sorted(fixed, key=lambda n: n or 0)[: machine.settings.max_hosts]

    def check_duties(self) -> None:
        """Look at what everybody has to do."""
        machine, plan = self.machine, self.machine.plan
        duties = {agent: machine.duty(agent) for agent in machine.agents}
        if machine.phase is Phase.OVER:
            assert machine.outcome is not None
            assert {machine.duty(a) for a in (*self.here, "?")} == {Leave(machine.outcome)}
            return
        assert machine.outcome is None
        assert isinstance(machine.duty("?"), Rejoin)
        for agent, duty in duties.items():
            if machine._agents[agent].machine in machine.excluded:
                assert isinstance(duty, Leave) and duty.outcome.code == 1
                continue
            runs = machine.phase is not Phase.GATHERING
            if plan is None or not runs or agent not in plan.members or agent in self.done:
                waits = machine.phase is Phase.GATHERING
                assert isinstance(duty, Wait) and (duty.timer is not None) == waits
            elif machine.phase is Phase.STOPPING:
                assert duty == Stop(plan)
            elif self.ready is not None:
                assert duty == Work(plan, self.ready)
        if machine.phase is Phase.RUNNING and self.ready is None:
            first = [a for a in plan.members if a in duties] if plan is not None else []
            prepares = [a for a, duty in duties.items() if isinstance(duty, Prepare)]
            assert prepares in ([], first[:1])
            assert prepares or first[0] in self.done
        if machine.phase is Phase.GATHERING:
            hopeful = plan is None or machine.missing > 0
            assert hopeful, "enough hosts are here, and no round begins"
            assert machine.missing == max(0, machine.settings.min_hosts - self.able())

    def able(self) -> int:
        """Count who could take part now."""
        able = [
            a
            for a in self.machine._agents.values()
            if a.machine not in self.machine.excluded and a.agent not in self.leaving
        ]
        ranks = {a.node_rank for a in able}
        return min(self.machine.settings.max_hosts, len(able) if None in ranks else len(ranks))

    def check(self) -> None:
        machine, wanted = self.machine, self.machine.settings
        assert machine.restarts <= wanted.max_restarts
        plan = machine.plan
        if plan is None:
            return
        assert len(set(plan.members)) == len(plan.members)
        assert len(plan.hosts) == len(plan.nprocs) == len(plan.members)
        ranks = [plan.owner(rank) for rank in range(plan.world_size + 1)]
        assert ranks[-1] is None
        assert [ranks.count(agent) for agent in plan.members] == list(plan.nprocs)
        if not isinstance(machine, ElasticMachine):
            assert wanted.min_hosts <= len(plan.members) <= wanted.max_hosts
        elif len(plan.members) > wanted.max_hosts:
            assert len(set(plan.members) & set(self.here)) <= wanted.max_hosts + 1

    def obey(self, agent: str) -> None:
        """Let an agent do its duty."""
        duty = self.machine.duty(agent)
        match duty:
            case Work():
                others = {number for a, number in self.running.items() if a != agent}
                assert others <= {duty.plan.number}, "two rounds run at once"
                assert self.machine._agents[agent].machine not in self.machine.excluded
                self.running[agent] = duty.plan.number
            case Prepare():
                self.tell(Ready(agent, duty.plan.number, "10.0.0.1", 29500))
            case Stop():
                self.running.pop(agent, None)
                self.tell(Ended(agent, duty.plan.number))
            case Leave() | Rejoin():
                self.running.pop(agent, None)
                self.here.remove(agent)
                if isinstance(duty, Leave):
                    self.tell(Left(agent, duty.outcome.code))
            case Wait():
                if duty.timer is not None and self.draw.random() < 0.3:
                    self.tell(Expired(duty.timer.name))

    def join(self) -> None:
        agent, self.born = f"{self.born}", self.born + 1
        node_rank = self.draw.choice([None, None, self.draw.randrange(4)])
        self.here.append(agent)
        host = f"h{self.draw.randrange(5)}"
        self.tell(Joined(agent, host, self.draw.randrange(1, 4), node_rank))

    def work(self, agent: str) -> None:
        """Let something become of an agent's workers."""
        plan, number = self.machine.plan, self.running.get(agent)
        if plan is None or number is None or agent not in plan.members:
            return
        node = plan.node_of(agent)
        local = self.draw.randrange(plan.nprocs[node])
        rank = sum(plan.nprocs[:node]) + local
        elastic = isinstance(self.machine, ElasticMachine)
        if self.draw.random() < 0.5:
            peer = self.draw.choice([None, self.draw.randrange(plan.world_size)])
            duty = self.machine.duty(agent)
            times = dict(duty.replaced).get(local, 0) if isinstance(duty, Work) else 0
            self.tell(failed(agent, number, local, rank, peer=peer, times=times))
        elif elastic:
            self.tell(Finished(agent, number, local))
        else:
            del self.running[agent]
            self.tell(Ended(agent, number, well=True))

    def strike(self) -> None:
        agent = self.draw.choice(self.here)
        if self.draw.random() < 0.5:
            self.tell(Left(agent, 143))
            if agent not in self.machine.agents:
                self.here.remove(agent)
                self.running.pop(agent, None)
        else:
            self.here.remove(agent)
            self.running.pop(agent, None)
            self.tell(Lost(agent))

    def step(self) -> None:
        kind = self.draw.random()
        if not self.here or kind < 0.15:
            self.join()
        elif kind < 0.25:
            self.strike()
        elif kind < 0.45:
            self.work(self.draw.choice(self.here))
        elif kind < 0.5 and self.log:
            late = self.draw.choice(self.log)  # and twice
            if not isinstance(late, Joined) or late.agent in self.machine.agents:
                self.tell(late)
        elif kind < 0.52 and self.machine.plan is not None:
            self.tell(Missing(self.draw.choice(self.here), self.machine.plan.number))
        else:
            self.obey(self.draw.choice(self.here))

    def finish(self) -> None:
        """Let nothing more happen but what must: everybody does his duty, all clocks run out."""
        for _ in range(200):
            if self.machine.phase is Phase.OVER or not self.machine.agents:
                return
            for agent in list(self.here):
                duty = self.machine.duty(agent)
                self.obey(agent)
                if isinstance(duty, Wait) and duty.timer is not None:
                    self.tell(Expired(duty.timer.name))
                number = self.running.get(agent)
                if number is not None and isinstance(self.machine, ElasticMachine):
                    plan = self.machine.plan
                    assert plan is not None
                    for local in range(plan.nprocs[plan.node_of(agent)]):
                        self.tell(Finished(agent, number, local))
                elif number is not None:
                    del self.running[agent]
                    self.tell(Ended(agent, number, well=True))
        raise AssertionError("the history has no end")


def wishes(draw: random.Random) -> Settings:
    least = draw.randrange(1, 4)
    return Settings(
        min_hosts=least,
        max_hosts=least + draw.choice([0, 0, 1, 3]),
        max_restarts=draw.randrange(5),
        exclude_after=draw.randrange(1, 4),
        min_ranks=draw.randrange(1, 4),
    )


@pytest.mark.parametrize("make", [Machine, ElasticMachine])
@settings(max_examples=1500, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 60))
def test_random_histories_keep_the_rules_and_end(make: Make, seed: int, steps: int) -> None:
    draw = random.Random(seed)
    world = World(make(wishes(draw)), draw)
    for _ in range(steps):
        world.step()
    world.finish()
    again, at = make(world.machine.settings), random.Random(seed).randrange(len(world.log) + 1)
    for event in world.log[:at]:
        again.apply(event)
    again = copy(again)
    for event in world.log[at:]:
        again.apply(event)
    assert again == world.machine


def started(machine: Machine, *agents: str, nproc: int = 2) -> Plan:
    for agent in agents:
        machine.apply(Joined(agent, f"host-{agent}", nproc))
    for agent in agents:
        duty = machine.duty(agent)
        if isinstance(duty, Wait) and duty.timer is not None:
            machine.apply(Expired(duty.timer.name))
    return ready(machine)


def ready(machine: Machine) -> Plan:
    plan = machine.plan
    assert plan is not None
    first = plan.members[0]
    assert isinstance(machine.duty(first), Prepare)
    machine.apply(Ready(first, plan.number, "10.0.0.1", 1))
    assert isinstance(machine.duty(first), Work)
    return plan


def end_round(machine: Machine, plan: Plan) -> None:
    for agent in plan.members:
        if agent in machine.agents:
            assert isinstance(machine.duty(agent), Stop)
            machine.apply(Ended(agent, plan.number))


def test_all_members_succeed_the_job_ends_well() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=2))
    started(machine, "a", "b")
    machine.apply(Ended("a", 0, well=True))
    assert machine.duty("a") == Wait()
    machine.apply(Ended("b", 0, well=True))
    assert machine.outcome is not None
    assert machine.outcome.code == 0


def test_a_failure_within_the_limit_starts_the_next_round_in_the_same_order() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=2, max_restarts=1))
    plan = started(machine, "a", "b")
    machine.apply(failed("b", 0, 1, 3))
    end_round(machine, plan)
    again = ready(machine)
    assert (again.number, again.members, machine.restarts) == (1, ("a", "b"), 1)
    machine.apply(failed("a", 1, 0, 0, code=7))
    end_round(machine, again)
    assert machine.outcome is not None
    assert machine.outcome.code == 7
    assert machine.outcome.failure is not None
    assert machine.outcome.failure.rank == 0


def test_the_rank_that_is_blamed_counts_not_the_one_that_noticed() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=2))
    plan = started(machine, "a", "b")
    machine.apply(failed("a", 0, 0, 0, code=1, peer=3))
    machine.apply(failed("b", 0, 1, 3, code=9))
    end_round(machine, plan)
    assert machine.outcome is not None
    assert machine.outcome.code == 9


def test_a_lost_host_counts_as_restart_and_survivors_keep_their_order() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=4, max_restarts=1))
    plan = started(machine, "a", "b", "c")
    machine.apply(Lost("a"))
    end_round(machine, plan)
    machine.apply(Joined("d", "host-d", 1))
    assert machine.restarts == 1
    again = machine.plan
    assert again is not None
    assert again.members == ("b", "c")
    assert machine.phase is Phase.STOPPING  # for d came, and there is room
    end_round(machine, again)
    assert ready(machine).members == ("b", "c", "d")
    assert machine.restarts == 1


def test_a_host_that_fails_first_repeatedly_is_left_out() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=2, max_restarts=9, exclude_after=2))
    plan = started(machine, "a", "b")
    for _ in range(2):
        machine.apply(failed("b", plan.number, 0, 2))
        end_round(machine, plan)
        plan = ready(machine)
    assert plan.members == ("a",)
    assert machine.excluded == {"host-b"}
    assert isinstance(machine.duty("b"), Leave)


def test_the_last_hosts_are_never_left_out() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=2, max_restarts=5, exclude_after=1))
    plan = started(machine, "a", "b")
    machine.apply(failed("b", 0, 0, 2))
    end_round(machine, plan)
    assert ready(machine).members == ("a", "b")


def test_node_ranks_that_users_fixed_are_respected() -> None:
    machine = Machine(Settings(min_hosts=3, max_hosts=3))
    for agent, rank in (("a", 2), ("b", 0), ("c", 1)):
        machine.apply(Joined(agent, agent, 1, rank))
    assert ready(machine).members == ("b", "c", "a")


def test_too_few_hosts_end_the_job_when_the_join_timeout_is_over() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=2, join_timeout_s=7))
    machine.apply(Joined("a", "host-a", 1))
    duty = machine.duty("a")
    assert isinstance(duty, Wait)
    assert duty.timer is not None
    assert duty.timer.after_s == 7
    machine.apply(Expired(duty.timer.name))
    assert machine.outcome is not None
    assert machine.outcome.code == 1


def test_a_host_that_takes_its_leave_ends_a_job_of_a_fixed_number() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=2, max_restarts=3))
    plan = started(machine, "a", "b")
    machine.apply(Left("b", 143))
    end_round(machine, plan)
    assert machine.outcome is not None
    assert machine.outcome.code == 143


def test_a_host_that_takes_its_leave_is_waited_for_and_costs_no_restart() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=2))
    plan = started(machine, "a", "b")
    machine.apply(Left("b", 143))
    machine.apply(Ended("a", 0))
    assert machine.phase is Phase.STOPPING  # b's workers are still there
    machine.apply(Ended("b", 0))
    assert ready(machine).members == ("a",)
    assert machine.restarts == 0
    assert plan.number == 0


def test_an_agent_that_was_given_up_has_to_join_anew() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=2))
    started(machine, "a", "b")
    machine.apply(Lost("b"))
    assert isinstance(machine.duty("b"), Rejoin)


def test_elastic_a_dead_worker_is_replaced_and_the_others_are_left_alone() -> None:
    machine = ElasticMachine(Settings(min_hosts=1, max_hosts=2, max_restarts=1))
    started(machine, "a", "b")
    machine.apply(failed("b", 0, 1, 3))
    duty = machine.duty("b")
    assert isinstance(duty, Work)
    assert duty.replaced == ((1, 1),)
    assert isinstance(machine.duty("a"), Work)
    machine.apply(failed("b", 0, 1, 3, times=1))  # no restart is left
    assert machine.phase is Phase.RUNNING
    assert machine.living == 3


def test_elastic_newcomers_get_numbers_that_nobody_had() -> None:
    machine = ElasticMachine(Settings(min_hosts=1, max_hosts=2))
    started(machine, "a", "b")
    machine.apply(Lost("a"))
    assert machine.phase is Phase.RUNNING
    machine.apply(Joined("c", "host-c", 2))
    plan = machine.plan
    assert plan is not None
    assert plan.members == ("a", "b", "c")
    assert plan.owner(4) == "c"
    assert isinstance(machine.duty("c"), Work)


def test_elastic_too_few_ranks_end_the_job() -> None:
    machine = ElasticMachine(Settings(min_ranks=3, max_hosts=2, min_hosts=2))
    plan = started(machine, "a", "b")
    machine.apply(failed("a", 0, 0, 0))
    assert machine.phase is Phase.RUNNING
    machine.apply(failed("a", 0, 1, 1))
    end_round(machine, plan)
    assert machine.outcome is not None
    assert machine.outcome.code == 3
    assert "--min-ranks 3" in machine.outcome.limit


def test_elastic_a_lost_host_is_told_and_so_is_one_that_was_refused() -> None:
    machine = ElasticMachine(Settings(min_hosts=1, max_hosts=2))
    started(machine, "a", "b")
    machine.apply(Refused("host-c", "nnodes"))
    machine.apply(Lost("a", "its launcher has ended"))
    machine.apply(Lost("a", "again"))
    assert ["host-c" in note for note in machine.notes] == [True, False]
    assert "host-a" in machine.notes[1]


def test_elastic_the_job_succeeds_if_one_worker_does() -> None:
    machine = ElasticMachine(Settings(max_restarts=3))
    plan = started(machine, "a")
    machine.apply(Finished("a", 0, 0))
    machine.apply(failed("a", 0, 1, 1))  # nobody is replaced any more
    end_round(machine, plan)
    assert machine.outcome is not None
    assert machine.outcome.code == 0


def test_elastic_the_process_that_failed_is_told_not_the_one_in_its_place() -> None:
    machine = ElasticMachine(Settings(max_restarts=1))
    started(machine, "a")
    dead = failed("a", 0, 1, 1)
    machine.apply(dead)
    machine.apply(Finished("a", 0, 0))
    machine.apply(Finished("a", 0, 1))
    well = dataclasses.replace(dead.worker, pid=7, exit=Exit(code=0))
    machine.apply(Ended("a", 0, (well,)))
    assert machine.outcome is not None
    assert machine.outcome.failure == dead.worker
    assert machine.outcome.ranks == (well,)


def test_the_first_that_says_where_rank_0_is_counts() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=2))
    plan = started(machine, "a", "b")
    before = machine.duty("b")
    machine.apply(Ready("b", plan.number, "10.0.0.2", 2))
    assert machine.duty("b") == before


def test_a_broken_connection_stops_the_round_and_the_next_waits_until_it_is_clear() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=2, max_restarts=3))
    plan = started(machine, "a", "b")
    machine.apply(Missing("b", 0))
    machine.apply(Ended("a", 0))
    assert machine.phase is Phase.STOPPING  # b may have ranks that run
    assert isinstance(machine.duty("b"), Stop)
    machine.apply(Ended("b", 0))  # it is back
    assert machine.plan is not None and machine.plan.number == plan.number + 1
    machine.apply(Missing("b", 0))
    assert machine.phase is Phase.RUNNING


def test_who_coordinates_and_leaves_ends_the_job() -> None:
    machine = Machine(Settings(min_hosts=1, max_hosts=3))
    plan = started(machine, "a", "b")
    machine.apply(Left("a", 143, "told to", ends_job=True))
    end_round(machine, plan)
    assert machine.outcome is not None
    assert (machine.outcome.code, machine.outcome.why) == (143, "told to")


@pytest.mark.parametrize("raised", [False, True])
def test_hosts_that_do_not_reach_each_other_are_named(raised: bool) -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=2, endpoint="n:1"))
    started(machine, "a", "b")
    blames = failed("a", 0, 0, 0, code=1, peer=2)
    machine.apply(blames)
    other = failed("b", 0, 0, 2, code=1, peer=0).worker
    if not raised:  # it was ended before it had noticed
        other = dataclasses.replace(other, crash=None, ended_by_launcher=True)
    machine.apply(Ended("a", 0, (blames.worker,)))
    machine.apply(Ended("b", 0, (other,)))
    assert machine.outcome is not None
    assert machine.outcome.code == 1
    assert "do not reach each other, though both reach n:1" in machine.outcome.why
    assert "host-a and host-b" in machine.outcome.why or "host-b and host-a" in machine.outcome.why


def test_the_state_stays_small_though_many_ranks_say_much() -> None:
    machine = Machine(Settings(min_hosts=2, max_hosts=2))
    started(machine, "a", "b", nproc=500)
    crash = Crash(type="E", message="m" * 8000, traceback="t" * 8000, peer=None)
    ranks = tuple(
        RankResult(rank=rank, host="h", pid=rank, exit=Exit(code=1), crash=crash)
        for rank in range(1000)
    )
    machine.apply(Failed("a", 0, 0, ranks[0]))
    machine.apply(Ended("a", 0, ranks[:500]))
    machine.apply(Ended("b", 0, ranks[500:]))
    assert machine.outcome is not None and machine.outcome.failure is not None
    assert machine.outcome.failure.crash == crash
    assert len(machine.outcome.ranks) == 1000
    assert len(msgspec.msgpack.encode(machine)) < 1 << 19
